import "fake-indexeddb/auto";
import { afterEach, describe, expect, it, vi } from "vitest";
import {
  exportName,
  newConversation,
  newMessage,
  prompt,
  toJson,
  toMarkdown,
  withMessages,
} from "../../src/history/conversation";
import { openHistory } from "../../src/history/store";

const question = newMessage("user", "What is\nthe tallest mountain?");
const answer = newMessage("assistant", "Mount Everest.", { model: "tiny" });

describe("a conversation", () => {
  it("is named by its first question", () => {
    const named = withMessages(newConversation(1), [question, answer], 2);
    expect(named.title).toBe("What is the tallest mountain?");
    expect(named.updated_ms).toBe(2);
    const long = withMessages(named, [newMessage("user", "word ".repeat(30))], 3);
    expect(long.title.length).toBeLessThanOrEqual(49);
  });

  it("leaves answers that never began out of the prompt", () => {
    const failed = newMessage("assistant", "", { state: "failed" });
    expect(prompt(" Be brief. ", [question, failed])).toEqual([
      { role: "system", content: "Be brief." },
      { role: "user", content: question.content },
    ]);
    expect(prompt("", [question])).toHaveLength(1);
  });

  it("is exported as Markdown and JSON, under a name that any system takes", () => {
    const conversation = withMessages(newConversation(1), [question, answer], 2);
    expect(toMarkdown(conversation)).toContain("## tiny\n\nMount Everest.");
    expect(JSON.parse(toJson(conversation))).toMatchObject({
      format: "everycast-conversation",
      messages: [{ role: "user" }, { role: "assistant", content: "Mount Everest." }],
    });
    expect(exportName(conversation, "md")).toBe("what-is-the-tallest-mountain.md");
    expect(exportName({ ...conversation, title: "../?" }, "json")).toBe("chat.json");
  });
});

describe("the history", () => {
  afterEach(() => vi.unstubAllGlobals());

  it("keeps conversations, newest first", async () => {
    const history = await openHistory(() => undefined);
    expect(history.is_kept).toBe(true);
    const first = withMessages(newConversation(1), [question], 1);
    const second = withMessages(newConversation(2), [question], 2);
    await history.put(first);
    await history.put(second);
    expect((await history.list()).map(({ id }) => id)).toEqual([second.id, first.id]);
    await history.put({ ...first, updated_ms: 3 });
    expect((await history.list())[0]?.id).toBe(first.id);
    expect(await history.get(second.id)).toEqual(second);
    await history.delete(second.id);
    expect(await history.get(second.id)).toBeNull();
    await history.clear();
    expect(await history.list()).toEqual([]);
  });

  it("tells another tab of changes", async () => {
    const changed = vi.fn();
    await openHistory(changed);
    const other = await openHistory(() => undefined);
    await other.put(newConversation(1));
    await vi.waitFor(() => expect(changed).toHaveBeenCalled());
  });

  it("holds until the page is closed where the browser keeps nothing", async () => {
    vi.stubGlobal("indexedDB", undefined);
    const history = await openHistory(() => undefined);
    expect(history.is_kept).toBe(false);
    const conversation = newConversation(1);
    await history.put(conversation);
    expect(await history.list()).toEqual([conversation]);
  });
});
