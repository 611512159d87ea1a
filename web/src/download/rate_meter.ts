/** Bytes a second over the last seconds, and how long the rest will take. */

const WINDOW_S = 8;

export class RateMeter {
  private readonly samples: { readonly time_s: number; readonly num_bytes: number }[] = [];

  /** num_bytes: all that have come so far. */
  add(num_bytes: number, time_s: number): void {
    const last = this.samples.at(-1);
    if (last !== undefined && num_bytes < last.num_bytes) this.samples.length = 0;
    this.samples.push({ time_s, num_bytes });
    while (this.samples.length > 2 && time_s - (this.samples[0]?.time_s ?? 0) > WINDOW_S) {
      this.samples.shift();
    }
  }

  /** Bytes a second; null until half a second was seen. */
  get bytes_per_s(): number | null {
    const first = this.samples[0];
    const last = this.samples.at(-1);
    if (first === undefined || last === undefined || last.time_s - first.time_s < 0.5) return null;
    return (last.num_bytes - first.num_bytes) / (last.time_s - first.time_s);
  }

  secondsLeft(num_bytes: number): number | null {
    const rate = this.bytes_per_s;
    return rate === null || rate <= 0 ? null : num_bytes / rate;
  }
}
