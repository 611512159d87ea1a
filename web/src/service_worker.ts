/** Keeps the page itself, so that it opens without a network. Models are kept by the downloader. */

const scope = self as unknown as ServiceWorkerGlobalScope;

// Filled in by the build.
declare const __SHELL_FILES__: readonly string[];
declare const __SHELL_VERSION__: string;

const SHELL = `everycast/shell-${__SHELL_VERSION__}`;
/** The last list of models that the host gave. */
const INDEX = "everycast/index";
const OURS = "everycast/shell-";

scope.addEventListener("install", (event) => {
  event.waitUntil(
    (async () => {
      const cache = await caches.open(SHELL);
      await cache.addAll(__SHELL_FILES__.map((file) => new Request(file, { cache: "no-cache" })));
      // The page that is open now has asked for the list already, past this worker.
      const index = await caches.open(INDEX);
      await index.add(new Request("models.json", { cache: "no-cache" })).catch(() => undefined);
      await scope.skipWaiting();
    })(),
  );
});

scope.addEventListener("activate", (event) => {
  event.waitUntil(
    (async () => {
      // The one before stays: a page that is still open may ask for more of its files.
      const shells = (await caches.keys()).filter((name) => name.startsWith(OURS));
      for (const name of shells.filter((name) => name !== SHELL).slice(0, -1)) {
        await caches.delete(name);
      }
      await scope.clients.claim();
    })(),
  );
});

scope.addEventListener("fetch", (event) => {
  const { request } = event;
  const url = new URL(request.url);
  const home = new URL(scope.registration.scope);
  if (request.method !== "GET" || url.origin !== home.origin) return;
  if (!url.pathname.startsWith(home.pathname)) return;
  const path = url.pathname.slice(home.pathname.length);
  if (request.mode === "navigate") {
    event.respondWith(page(request, home));
  } else if (path.startsWith("assets/")) {
    event.respondWith(fromShell(request));
  } else if (path === "models.json") {
    event.respondWith(fromNetwork(request));
  } else if (path.startsWith("models/") && path.endsWith(".wasm")) {
    // On localhost the engine asks the network for its library, past its own cache.
    event.respondWith(library(request));
  }
});

async function page(request: Request, home: URL): Promise<Response> {
  try {
    const response = await fetch(request);
    if (response.ok || response.type === "opaqueredirect") return response;
  } catch {
    // Offline.
  }
  return (await caches.match(home.href, { cacheName: SHELL })) ?? Response.error();
}

async function fromShell(request: Request): Promise<Response> {
  // Named by its contents: the one of any shell is right.
  return (await caches.match(request)) ?? fetch(request);
}

async function fromNetwork(request: Request): Promise<Response> {
  const cache = await caches.open(INDEX);
  try {
    const response = await fetch(request);
    if (response.ok) await cache.put(request, response.clone());
    return response;
  } catch {
    return (await cache.match(request)) ?? Response.error();
  }
}

async function library(request: Request): Promise<Response> {
  return (await caches.match(request.url, { cacheName: "webllm/wasm" })) ?? fetch(request);
}
