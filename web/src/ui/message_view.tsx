import { useEffect, useRef, useState } from "preact/hooks";
import { copyText } from "../clipboard";
import { formatRate, formatWait } from "../format";
import type { Message } from "../history/conversation";
import { IconButton } from "./icons";
import { MarkdownView } from "./markdown_view";

interface MessageProps {
  readonly message: Message;
  /** Null while that cannot be done. */
  readonly onEdit: ((text: string) => void) | null;
  readonly onRegenerate: (() => void) | null;
}

export function MessageView({ message, onEdit, onRegenerate }: MessageProps) {
  return message.role === "user" ? (
    <Question message={message} onEdit={onEdit} />
  ) : (
    <Answer message={message} onRegenerate={onRegenerate} />
  );
}

function Question({ message, onEdit }: Omit<MessageProps, "onRegenerate">) {
  const [is_editing, setEditing] = useState(false);
  if (is_editing && onEdit !== null) {
    const finish = (text: string | null): void => {
      setEditing(false);
      if (text !== null) onEdit(text);
    };
    return <QuestionEditor text={message.content} onFinish={finish} />;
  }
  return (
    <article class="message question" aria-label="You">
      <div class="bubble">{message.content}</div>
      <div class="message-tools">
        <CopyButton text={message.content} label="Copy question" />
        {onEdit !== null && (
          <IconButton icon="edit" label="Edit question" onClick={() => setEditing(true)} />
        )}
      </div>
    </article>
  );
}

interface EditorProps {
  readonly text: string;
  /** With null: leave it as it was. */
  readonly onFinish: (text: string | null) => void;
}

function QuestionEditor({ text, onFinish }: EditorProps) {
  const area = useRef<HTMLTextAreaElement>(null);
  useEffect(() => area.current?.focus(), []);
  const send = (): void => {
    const edited = area.current?.value.trim() ?? "";
    onFinish(edited === "" ? null : edited);
  };
  const onKeyDown = (event: KeyboardEvent): void => {
    if (event.key === "Escape") {
      event.stopPropagation();
      onFinish(null);
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  };
  return (
    <article class="message question editing" aria-label="You">
      <textarea
        ref={area}
        aria-label="Edit question"
        defaultValue={text}
        rows={Math.min(10, text.split("\n").length + 1)}
        onKeyDown={onKeyDown}
      />
      <p class="hint">What follows this question is replaced by the new answer.</p>
      <div class="row end">
        <button type="button" class="button quiet" onClick={() => onFinish(null)}>
          Cancel
        </button>
        <button type="button" class="button primary" onClick={send}>
          Ask again
        </button>
      </div>
    </article>
  );
}

function Answer({ message, onRegenerate }: Omit<MessageProps, "onEdit">) {
  return (
    <article class="message answer" aria-label={message.model ?? "Assistant"}>
      <MarkdownView text={message.content} />
      <div class="message-tools">
        <CopyButton text={message.content} label="Copy answer" />
        {onRegenerate !== null && (
          <IconButton icon="redo" label="Regenerate answer" onClick={onRegenerate} />
        )}
        <span class="meta">{describeEnd(message)}</span>
      </div>
    </article>
  );
}

/** The answer that is being written; not a live region, or every token would be read out. */
export function GrowingAnswer({ text, is_stopping }: { text: string; is_stopping: boolean }) {
  return (
    <article class="message answer growing" aria-label="Answer, being written" aria-busy="true">
      {text === "" ? (
        <p class="thinking">{is_stopping ? "Stopping…" : "Reading your question…"}</p>
      ) : (
        <MarkdownView text={text} />
      )}
    </article>
  );
}

function CopyButton({ text, label }: { readonly text: string; readonly label: string }) {
  const [is_copied, setCopied] = useState(false);
  const copy = (): void => {
    void copyText(text).then((is_allowed) => {
      setCopied(is_allowed);
      setTimeout(() => setCopied(false), 1500);
    });
  };
  return (
    <IconButton
      icon={is_copied ? "check" : "copy"}
      label={is_copied ? "Copied" : label}
      onClick={copy}
    />
  );
}

function describeEnd({ state, outcome }: Message): string {
  const parts: string[] = [];
  if (state === "interrupted") parts.push("stopped");
  if (state === "length") parts.push("cut off at the limit of tokens");
  if (state === "failed") parts.push("broken off");
  if (outcome?.num_completion_tokens) parts.push(`${outcome.num_completion_tokens} tokens`);
  if (outcome?.decode_tokens_per_s) parts.push(formatRate(outcome.decode_tokens_per_s));
  if (outcome?.time_to_first_token_s) {
    parts.push(`first after ${formatWait(outcome.time_to_first_token_s)}`);
  }
  return parts.join(" · ");
}
