/** Conversations in IndexedDB: they never leave this browser. */

import type { Conversation } from "./conversation";

const DATABASE = "everycast";
const STORE = "conversations";
const CHANNEL = "everycast-history";

export interface HistoryStore {
  /** False where the browser keeps nothing, as in some private windows. */
  readonly is_kept: boolean;
  /** Newest first. */
  list(): Promise<readonly Conversation[]>;
  get(id: string): Promise<Conversation | null>;
  put(conversation: Conversation): Promise<void>;
  delete(id: string): Promise<void>;
  clear(): Promise<void>;
}

/** Opens the history; `onChange` is called when another tab changed it. */
export async function openHistory(onChange: () => void): Promise<HistoryStore> {
  try {
    const database = await openDatabase();
    return new DatabaseStore(database, onChange);
  } catch {
    return new MemoryStore();
  }
}

function openDatabase(): Promise<IDBDatabase> {
  const opening = indexedDB.open(DATABASE, 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore(STORE, { keyPath: "id" });
  return settle(opening);
}

function settle<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error ?? new Error("IndexedDB failed"));
  });
}

class DatabaseStore implements HistoryStore {
  readonly is_kept = true;
  private readonly channel = new BroadcastChannel(CHANNEL);

  constructor(
    private readonly database: IDBDatabase,
    onChange: () => void,
  ) {
    this.channel.onmessage = onChange;
    // A later version of the page wants another schema: do not stand in its way.
    database.onversionchange = () => database.close();
  }

  async list(): Promise<readonly Conversation[]> {
    const all: Conversation[] = await settle(this.store("readonly").getAll());
    return all.sort((a, b) => b.updated_ms - a.updated_ms);
  }

  async get(id: string): Promise<Conversation | null> {
    const found: Conversation | undefined = await settle(this.store("readonly").get(id));
    return found ?? null;
  }

  async put(conversation: Conversation): Promise<void> {
    await settle(this.store("readwrite").put(conversation));
    this.channel.postMessage(conversation.id);
  }

  async delete(id: string): Promise<void> {
    await settle(this.store("readwrite").delete(id));
    this.channel.postMessage(id);
  }

  async clear(): Promise<void> {
    await settle(this.store("readwrite").clear());
    this.channel.postMessage(null);
  }

  private store(mode: IDBTransactionMode): IDBObjectStore {
    return this.database.transaction(STORE, mode).objectStore(STORE);
  }
}

class MemoryStore implements HistoryStore {
  readonly is_kept = false;
  private readonly all = new Map<string, Conversation>();

  list(): Promise<readonly Conversation[]> {
    return Promise.resolve([...this.all.values()].sort((a, b) => b.updated_ms - a.updated_ms));
  }

  get(id: string): Promise<Conversation | null> {
    return Promise.resolve(this.all.get(id) ?? null);
  }

  put(conversation: Conversation): Promise<void> {
    this.all.set(conversation.id, conversation);
    return Promise.resolve();
  }

  delete(id: string): Promise<void> {
    this.all.delete(id);
    return Promise.resolve();
  }

  clear(): Promise<void> {
    this.all.clear();
    return Promise.resolve();
  }
}
