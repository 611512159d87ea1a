import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Icon } from "./icons";

interface ComposerProps {
  readonly is_ready: boolean;
  readonly is_answering: boolean;
  readonly is_stopping: boolean;
  readonly placeholder: string;
  readonly onAsk: (text: string) => void;
  readonly onStop: () => void;
}

export function Composer(props: ComposerProps) {
  const { is_ready, is_answering, is_stopping, placeholder, onAsk, onStop } = props;
  const [text, setText] = useState("");
  const area = useRef<HTMLTextAreaElement>(null);

  // As high as its text, up to the limit of the style sheet.
  useLayoutEffect(() => {
    if (area.current === null) return;
    area.current.style.height = "auto";
    area.current.style.height = `${area.current.scrollHeight}px`;
  }, [text]);
  useEffect(() => {
    if (is_ready) area.current?.focus({ preventScroll: true });
  }, [is_ready]);

  const ask = (): void => {
    if (!is_ready || is_answering || text.trim() === "") return;
    onAsk(text.trim());
    setText("");
  };
  const onKeyDown = (event: KeyboardEvent): void => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      ask();
    }
  };
  return (
    <form
      class="composer"
      onSubmit={(event) => {
        event.preventDefault();
        ask();
      }}
    >
      <div class="composer-box">
        <label class="hidden" for="question">
          Your question
        </label>
        <textarea
          id="question"
          ref={area}
          rows={1}
          value={text}
          placeholder={placeholder}
          disabled={!is_ready}
          enterkeyhint="send"
          onInput={(event) => setText(event.currentTarget.value)}
          onKeyDown={onKeyDown}
        />
        {is_answering ? (
          <button
            type="button"
            class="send"
            aria-label="Stop answering"
            title="Stop (Esc)"
            disabled={is_stopping}
            onClick={onStop}
          >
            <Icon name="stop" />
          </button>
        ) : (
          <button
            type="submit"
            class="send"
            aria-label="Send"
            title="Send (Enter)"
            disabled={!is_ready || text.trim() === ""}
          >
            <Icon name="send" />
          </button>
        )}
      </div>
      <p class="composer-hint">
        <kbd>Enter</kbd> sends, <kbd>Shift</kbd> <kbd>Enter</kbd> starts a line, <kbd>Esc</kbd>{" "}
        stops. Models make mistakes.
      </p>
    </form>
  );
}
