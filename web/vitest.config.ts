import { defineConfig } from "vitest/config";

/** Apart from `vite.config.ts`: who builds the page has no vitest. */
export default defineConfig({
  test: { include: ["tests/unit/**/*.test.ts"], setupFiles: ["tests/unit/setup.ts"] },
});
