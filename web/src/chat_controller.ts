/** Conversations: asking, stopping, regenerating, editing, and the history. */

import type { AppState, EngineState } from "./app_state";
import type { SamplingSettings } from "./engine/backend";
import {
  type Conversation,
  type Message,
  newConversation,
  newMessage,
  prompt,
  withMessages,
} from "./history/conversation";
import type { HistoryStore } from "./history/store";
import type { ModelController } from "./model_controller";
import { advised } from "./settings";
import type { Store } from "./store";

/** How often a growing answer is saved, so that a closed tab loses little. */
const SAVE_INTERVAL_MS = 2000;

export class ChatController {
  private history: HistoryStore | null = null;
  private answer = new AbortController();

  constructor(
    private readonly store: Store<AppState>,
    private readonly models: ModelController,
  ) {}

  async begin(history: HistoryStore): Promise<void> {
    this.history = history;
    this.store.set({ is_history_kept: history.is_kept });
    await this.refresh();
  }

  /** Reads the history again, after another tab changed it. */
  async refresh(): Promise<void> {
    if (this.history === null) return;
    const conversations = await this.history.list();
    const { conversation, answering } = this.store.state;
    const same = conversations.find((candidate) => candidate.id === conversation.id);
    const is_ours = answering?.conversation_id === conversation.id;
    this.store.set({
      conversations,
      ...(same !== undefined && !is_ours ? { conversation: same } : {}),
    });
  }

  open(conversation: Conversation): void {
    this.stop();
    this.store.set({ conversation });
  }

  startNew(): void {
    this.open(newConversation(Date.now()));
  }

  async delete(conversation: Conversation): Promise<void> {
    await this.history?.delete(conversation.id);
    if (this.store.state.conversation.id === conversation.id) this.startNew();
    await this.refresh();
    this.store.set({ announcement: "The conversation was deleted." });
  }

  async deleteAll(): Promise<void> {
    await this.history?.clear();
    this.startNew();
    await this.refresh();
    this.store.set({ announcement: "All conversations were deleted." });
  }

  async ask(text: string): Promise<void> {
    const { conversation, answering } = this.store.state;
    if (answering !== null || text.trim() === "") return;
    await this.answerTo([...conversation.messages, newMessage("user", text)]);
  }

  /** Asks the question of an answer again; what came after it is dropped. */
  async regenerate(message: Message): Promise<void> {
    const { conversation, answering } = this.store.state;
    if (answering !== null) return;
    const index = conversation.messages.findIndex((candidate) => candidate.id === message.id);
    if (index > 0) await this.answerTo(conversation.messages.slice(0, index));
  }

  /** Asks a question in other words; what came after it is dropped. */
  async edit(message: Message, text: string): Promise<void> {
    const { conversation, answering } = this.store.state;
    if (answering !== null || text.trim() === "") return;
    const index = conversation.messages.findIndex((candidate) => candidate.id === message.id);
    if (index < 0) return;
    const before = conversation.messages.slice(0, index);
    await this.answerTo([...before, newMessage("user", text)]);
  }

  stop(): void {
    const { answering } = this.store.state;
    if (answering === null) return;
    this.answer.abort();
    this.store.set({ answering: { ...answering, is_stopping: true } });
  }

  private async answerTo(messages: readonly Message[]): Promise<void> {
    const { backend } = this.models;
    const { settings, engine } = this.store.state;
    if (backend === null) return;
    let conversation = withMessages(this.store.state.conversation, messages, Date.now());
    const model = nameOf(engine);
    let answer = newMessage("assistant", "", { model, state: "interrupted" });
    this.answer = new AbortController();
    this.store.set({
      conversation,
      notice: null,
      announcement: "Answering…",
      answering: {
        conversation_id: conversation.id,
        message_id: answer.id,
        text: "",
        is_stopping: false,
      },
    });
    await this.save(conversation);

    let text = "";
    let saved_ms = performance.now();
    const onText = (delta: string): void => {
      text += delta;
      const { answering } = this.store.state;
      if (answering?.message_id === answer.id)
        this.store.set({ answering: { ...answering, text } });
      if (performance.now() - saved_ms > SAVE_INTERVAL_MS) {
        saved_ms = performance.now();
        void this.save({ ...conversation, messages: [...messages, { ...answer, content: text }] });
      }
    };
    try {
      const request = {
        messages: prompt(settings.system_prompt, messages),
        sampling: withAdvice(settings.sampling, engine),
      };
      const outcome = await backend.chat(request, onText, this.answer.signal);
      const state = outcome.finish_reason === "stop" ? "complete" : outcome.finish_reason;
      answer = { ...answer, content: text, state, outcome };
    } catch (error) {
      answer = { ...answer, content: text, state: "failed" };
      const why = error instanceof Error ? error.message : String(error);
      this.store.set({ notice: { kind: "error", text: `No answer: ${why}`, actions: [] } });
    }
    conversation = withMessages(conversation, [...messages, answer], Date.now());
    const is_shown = this.store.state.conversation.id === conversation.id;
    this.store.set({
      answering: null,
      announcement: text === "" ? "No answer." : `Answer: ${text}`,
      ...(is_shown ? { conversation } : {}),
    });
    await this.save(conversation);
  }

  private async save(conversation: Conversation): Promise<void> {
    try {
      await this.history?.put(conversation);
      await this.refresh();
    } catch {
      const text = "The browser could not save this conversation; export it if you need it.";
      this.store.set({ notice: { kind: "error", text, actions: [] } });
    }
  }
}

/** The settings, with what the model's makers advise where the person set nothing. A server knows
 * its model's advice itself. */
function withAdvice(sampling: SamplingSettings, engine: EngineState): SamplingSettings {
  if (engine.phase !== "ready") return sampling;
  const advice = advised(engine.model.sampling);
  return {
    ...sampling,
    temperature: sampling.temperature ?? advice.temperature,
    top_p: sampling.top_p ?? advice.top_p,
  };
}

function nameOf(engine: EngineState): string {
  if (engine.phase === "server") return engine.name;
  return engine.phase === "ready" ? engine.model.name : "Assistant";
}
