import { webcrypto } from "node:crypto";

// Node.js 18 has it, but not as a global.
if (globalThis.crypto === undefined)
  Object.defineProperty(globalThis, "crypto", { value: webcrypto });
