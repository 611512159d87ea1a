/** A value that tells its listeners when it changes; the page's whole state is one. */

import { useEffect, useReducer } from "preact/hooks";

export class Store<T extends object> {
  private readonly listeners = new Set<() => void>();

  constructor(private value: T) {}

  get state(): T {
    return this.value;
  }

  set(patch: Partial<T>): void {
    this.value = { ...this.value, ...patch };
    for (const listener of [...this.listeners]) listener();
  }

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

/** The state of a store; the component is drawn again when it changes. */
export function useStore<T extends object>(store: Store<T>): T {
  const [, redraw] = useReducer((count: number) => count + 1, 0);
  useEffect(() => store.subscribe(() => redraw(undefined)), [store]);
  return store.state;
}
