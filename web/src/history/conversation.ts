/** Conversations as they are kept and exported. */

import type { ChatMessage, ChatOutcome } from "../engine/backend";

export type MessageState = "complete" | "interrupted" | "length" | "failed";

export interface Message {
  readonly id: string;
  readonly role: "user" | "assistant";
  readonly content: string;
  /** How an answer ended; a question is always complete. */
  readonly state: MessageState;
  /** Of an answer: what gave it, and how fast. */
  readonly model?: string;
  readonly outcome?: ChatOutcome;
}

export interface Conversation {
  readonly id: string;
  readonly title: string;
  readonly created_ms: number;
  readonly updated_ms: number;
  readonly messages: readonly Message[];
}

/** Unique for all that it is needed for, also where `crypto.randomUUID` is hidden: on plain http. */
function newId(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

const TITLE_LENGTH = 48;
export const UNTITLED = "New chat";

export function newConversation(now_ms: number): Conversation {
  return {
    id: newId(),
    title: UNTITLED,
    created_ms: now_ms,
    updated_ms: now_ms,
    messages: [],
  };
}

export function newMessage(
  role: Message["role"],
  content: string,
  rest: Partial<Message> = {},
): Message {
  return { state: "complete", ...rest, id: newId(), role, content };
}

/** The conversation with other messages: its title follows the first question. */
export function withMessages(
  conversation: Conversation,
  messages: readonly Message[],
  now_ms: number,
): Conversation {
  const first = messages.find((message) => message.role === "user")?.content.trim() ?? "";
  const line = first.split(/\s+/).join(" ");
  const title = line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH).trimEnd()}…` : line;
  return { ...conversation, messages, title: title || UNTITLED, updated_ms: now_ms };
}

/** What the model is asked with. An answer that failed before its first word is no turn. */
export function prompt(system_prompt: string, messages: readonly Message[]): ChatMessage[] {
  const turns = messages
    .filter((message) => message.role === "user" || message.content !== "")
    .map(({ role, content }) => ({ role, content }));
  const system = system_prompt.trim();
  return system === "" ? turns : [{ role: "system", content: system }, ...turns];
}

export function toMarkdown(conversation: Conversation): string {
  const turns = conversation.messages.map((message) => {
    const speaker = message.role === "user" ? "You" : (message.model ?? "Assistant");
    return `## ${speaker}\n\n${message.content.trim()}\n`;
  });
  return [`# ${conversation.title}\n`, ...turns].join("\n");
}

export function toJson(conversation: Conversation): string {
  return `${JSON.stringify({ format: "everycast-conversation", version: 1, ...conversation }, null, 2)}\n`;
}

/** A file name that any system takes. */
export function exportName(conversation: Conversation, extension: "json" | "md"): string {
  const words = conversation.title.normalize("NFKD").replace(/[^\p{L}\p{N}]+/gu, "-");
  return `${
    words
      .replace(/^-+|-+$/g, "")
      .slice(0, 40)
      .toLowerCase() || "chat"
  }.${extension}`;
}
