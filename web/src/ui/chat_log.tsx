import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import type { AppState } from "../app_state";
import type { ChatController } from "../chat_controller";
import { GrowingAnswer, MessageView } from "./message_view";

/** Distance from the end, in pixels, within which the log follows a growing answer. */
const FOLLOW_PX = 120;

interface LogProps {
  readonly state: AppState;
  readonly chat: ChatController;
  readonly can_ask: boolean;
}

export function ChatLog({ state, chat, can_ask }: LogProps) {
  const { conversation, answering } = state;
  const frame = useRef<HTMLDivElement>(null);
  const is_following = useRef(true);
  const growing = answering?.conversation_id === conversation.id ? answering : null;
  const can_change = can_ask && answering === null;

  useEffect(() => {
    is_following.current = true;
  }, [conversation.id, growing?.message_id]);
  useLayoutEffect(() => {
    if (is_following.current) frame.current?.scrollTo({ top: frame.current.scrollHeight });
  });
  const onScroll = (): void => {
    const { current } = frame;
    if (current === null) return;
    const rest = current.scrollHeight - current.scrollTop - current.clientHeight;
    is_following.current = rest < FOLLOW_PX;
  };
  return (
    <div class="log" ref={frame} onScroll={onScroll} tabIndex={0} role="region" aria-label="Chat">
      <div class="log-column">
        {conversation.messages.map((message) => (
          <MessageView
            key={message.id}
            message={message}
            onEdit={can_change ? (text) => void chat.edit(message, text) : null}
            onRegenerate={can_change ? () => void chat.regenerate(message) : null}
          />
        ))}
        {growing !== null && (
          <GrowingAnswer text={growing.text} is_stopping={growing.is_stopping} />
        )}
      </div>
    </div>
  );
}
