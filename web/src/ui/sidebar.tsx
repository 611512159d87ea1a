import type { Conversation } from "../history/conversation";
import { Icon, IconButton } from "./icons";

interface SidebarProps {
  readonly conversations: readonly Conversation[];
  readonly current_id: string;
  readonly is_history_kept: boolean;
  readonly onNew: () => void;
  readonly onOpen: (conversation: Conversation) => void;
  readonly onDelete: (conversation: Conversation) => void;
  readonly onSettings: () => void;
  readonly onClose: () => void;
}

export function Sidebar(props: SidebarProps) {
  const { conversations, current_id, is_history_kept } = props;
  return (
    <>
      <div class="sidebar-head">
        <span class="brand">everycast</span>
        <span class="only-phone">
          <IconButton icon="close" label="Close the list" onClick={props.onClose} />
        </span>
      </div>
      <button type="button" class="button new-chat" onClick={props.onNew}>
        <Icon name="plus" /> New chat
      </button>
      <nav class="history" aria-label="Conversations">
        {conversations.length === 0 ? (
          <p class="hint">Your conversations are kept here, in this browser only.</p>
        ) : (
          <ul>
            {conversations.map((conversation) => (
              <li key={conversation.id}>
                <button
                  type="button"
                  class="history-entry"
                  aria-current={conversation.id === current_id ? "true" : undefined}
                  onClick={() => props.onOpen(conversation)}
                >
                  {conversation.title}
                </button>
                <IconButton
                  icon="trash"
                  label={`Delete “${conversation.title}”`}
                  onClick={() => {
                    if (confirm(`Delete “${conversation.title}”?`)) props.onDelete(conversation);
                  }}
                />
              </li>
            ))}
          </ul>
        )}
        {!is_history_kept && (
          <p class="hint">This browser keeps nothing: conversations end with the page.</p>
        )}
      </nav>
      <button type="button" class="button quiet sidebar-foot" onClick={props.onSettings}>
        <Icon name="settings" /> Settings
      </button>
    </>
  );
}
