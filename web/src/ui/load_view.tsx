import type { EngineState, LoadProgress } from "../app_state";
import { formatBytes, formatSeconds } from "../format";

interface LoadProps {
  readonly engine: Extract<EngineState, { phase: "loading" }>;
  readonly onCancel: () => void;
}

/** How far a download or a start is, in bytes, rate and time left. */
export function LoadView({ engine, onCancel }: LoadProps) {
  const { model, progress } = engine;
  const fraction = fractionOf(progress);
  const { title, detail } = describe(progress);
  return (
    <section class="load" aria-label="Progress">
      <h2>{model.name}</h2>
      <p class="load-step">{title}</p>
      <progress aria-label={title} max={1} {...(fraction === null ? {} : { value: fraction })} />
      <p class="load-detail">{detail}</p>
      {progress.step !== "prepare" && (
        <button type="button" class="button" onClick={onCancel}>
          Pause
        </button>
      )}
    </section>
  );
}

function fractionOf(progress: LoadProgress): number | null {
  if (progress.step === "download") return progress.done_bytes / progress.total_bytes;
  return progress.step === "prepare" && progress.fraction > 0 ? progress.fraction : null;
}

function describe(progress: LoadProgress): { readonly title: string; readonly detail: string } {
  switch (progress.step) {
    case "checking":
      return { title: "Checking what is stored here…", detail: "" };
    case "waiting":
      return { title: "Another tab is downloading this model…", detail: "This one goes on after." };
    case "prepare":
      return { title: "Putting the model on the GPU…", detail: "Nothing more is downloaded." };
    case "download": {
      const { done_bytes, total_bytes, bytes_per_s, seconds_left } = progress;
      const parts = [`${formatBytes(done_bytes)} of ${formatBytes(total_bytes)}`];
      if (bytes_per_s !== null) parts.push(`${formatBytes(bytes_per_s)}/s`);
      if (seconds_left !== null) parts.push(`${formatSeconds(seconds_left)} left`);
      return { title: "Downloading…", detail: parts.join(" · ") };
    }
  }
}
