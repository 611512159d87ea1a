import { createHash } from "node:crypto";
import { fileURLToPath } from "node:url";
import { defineConfig, type Plugin } from "vite";

/** Tells the service worker which files make up the page: its own list, and a name for it. */
function listShell(): Plugin {
  return {
    name: "list-shell",
    apply: "build",
    generateBundle(_, bundle) {
      const sw = bundle["sw.js"];
      if (sw?.type !== "chunk") throw new Error("there is no service worker to tell");
      const files = Object.keys(bundle).filter((name) => name !== "sw.js");
      const shell = [
        "./",
        "./icon.svg",
        "./manifest.webmanifest",
        ...files.filter(isAsset).map((f) => `./${f}`),
      ];
      const contents = files.map((name) => {
        const file = bundle[name];
        return file?.type === "chunk" ? file.code : (file?.source ?? "");
      });
      const hash = createHash("sha256");
      for (const content of contents) hash.update(content);
      sw.code = sw.code
        .replace("__SHELL_FILES__", JSON.stringify(shell))
        .replace("__SHELL_VERSION__", JSON.stringify(hash.digest("hex").slice(0, 16)));
    },
  };
}

function isAsset(name: string): boolean {
  return name.startsWith("assets/");
}

export default defineConfig(({ mode }) => ({
  base: "./",
  plugins: [listShell()],
  resolve: {
    alias:
      mode === "mock"
        ? { "@mlc-ai/web-llm": fileURLToPath(new URL("tests/mock/web_llm.ts", import.meta.url)) }
        : {},
  },
  build: {
    target: "es2022",
    outDir: mode === "mock" ? "dist-mock" : "dist",
    modulePreload: { polyfill: false },
    // The engine, with its tokenizers in it, is loaded by the worker only.
    chunkSizeWarningLimit: 8000,
    assetsInlineLimit: 0,
    rollupOptions: {
      input: {
        index: fileURLToPath(new URL("index.html", import.meta.url)),
        sw: fileURLToPath(new URL("src/service_worker.ts", import.meta.url)),
      },
      output: {
        entryFileNames: (chunk) => (chunk.name === "sw" ? "sw.js" : "assets/[name]-[hash].js"),
      },
    },
  },
  worker: { format: "es" },
}));
