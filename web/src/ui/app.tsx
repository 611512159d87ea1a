import { useEffect, useLayoutEffect, useState } from "preact/hooks";
import type { AppState, EngineState, NoticeAction } from "../app_state";
import type { ChatController } from "../chat_controller";
import { exportName, toJson, toMarkdown } from "../history/conversation";
import type { ModelController } from "../model_controller";
import { type Store, useStore } from "../store";
import { ChatLog } from "./chat_log";
import { Composer } from "./composer";
import { Icon, IconButton } from "./icons";
import { ModelPanel } from "./model_panel";
import { Dialog, SettingsDialog } from "./settings_dialog";
import { Sidebar } from "./sidebar";

interface AppProps {
  readonly store: Store<AppState>;
  readonly models: ModelController;
  readonly chat: ChatController;
}

type Open = "none" | "sidebar" | "settings" | "model" | "export";

export function App({ store, models, chat }: AppProps) {
  const state = useStore(store);
  const [open, setOpen] = useState<Open>("none");
  const close = (): void => setOpen("none");
  const { engine, conversation, answering } = state;
  const can_ask = engine.phase === "ready" || engine.phase === "server";
  const is_answering = answering !== null;

  // Before the next key can come: a laid-out panel must be closable at once.
  useLayoutEffect(() => {
    const onKeyDown = (event: KeyboardEvent): void => {
      if (event.key !== "Escape") return;
      if (open === "sidebar") close();
      else if (open === "none") chat.stop();
    };
    addEventListener("keydown", onKeyDown);
    return () => removeEventListener("keydown", onKeyDown);
  }, [open]);
  useEffect(() => {
    // The panel's work is done once the model answers.
    if (engine.phase === "ready" && open === "model") close();
  }, [engine.phase]);

  const has_messages = conversation.messages.length > 0 || is_answering;
  return (
    <div class={open === "sidebar" ? "app sidebar-open" : "app"}>
      <aside class="sidebar" aria-label="History and settings">
        <Sidebar
          conversations={state.conversations}
          current_id={conversation.id}
          is_history_kept={state.is_history_kept}
          onNew={() => {
            chat.startNew();
            close();
          }}
          onOpen={(chosen) => {
            chat.open(chosen);
            close();
          }}
          onDelete={(chosen) => void chat.delete(chosen)}
          onSettings={() => setOpen("settings")}
          onClose={close}
        />
      </aside>
      {open === "sidebar" && <div class="backdrop" onClick={close} />}
      <div class="page">
        <header class="top">
          <span class="only-phone">
            <IconButton icon="menu" label="Conversations" onClick={() => setOpen("sidebar")} />
          </span>
          <h1 class="hidden">everycast: chat with a model on your device</h1>
          <ModelChip engine={engine} onClick={() => setOpen("model")} />
          <span class="grow" />
          {conversation.messages.length > 0 && (
            <IconButton
              icon="download"
              label="Export this chat"
              onClick={() => setOpen("export")}
            />
          )}
        </header>
        <NoticeBar store={store} models={models} />
        <main>
          {has_messages ? (
            <ChatLog state={state} chat={chat} can_ask={can_ask} />
          ) : (
            <div class="welcome">
              <div class="welcome-column">
                {can_ask ? <Greeting engine={engine} /> : <Introduction />}
                {!can_ask && <ModelPanel state={state} models={models} />}
              </div>
            </div>
          )}
          {has_messages && engine.phase === "loading" && (
            <div class="load-strip">
              <ModelPanel state={state} models={models} />
            </div>
          )}
          {(can_ask || has_messages) && (
            <Composer
              is_ready={can_ask}
              is_answering={is_answering}
              is_stopping={answering?.is_stopping ?? false}
              placeholder={can_ask ? "Ask anything" : "First start a model"}
              onAsk={(text) => void chat.ask(text)}
              onStop={() => chat.stop()}
            />
          )}
        </main>
      </div>
      {open === "settings" && (
        <SettingsDialog
          store={store}
          onDeleteHistory={() => void chat.deleteAll()}
          onClose={close}
        />
      )}
      {open === "model" && (
        <Dialog title="Model" onClose={close}>
          <ModelPanel state={state} models={models} />
        </Dialog>
      )}
      {open === "export" && (
        <Dialog title="Export this chat" onClose={close}>
          <div class="row">
            <button
              type="button"
              class="button"
              onClick={() => save(exportName(conversation, "md"), toMarkdown(conversation))}
            >
              Markdown
            </button>
            <button
              type="button"
              class="button"
              onClick={() => save(exportName(conversation, "json"), toJson(conversation))}
            >
              JSON
            </button>
          </div>
        </Dialog>
      )}
      <div class="hidden" role="status" aria-live="polite">
        {state.announcement}
      </div>
    </div>
  );
}

function Introduction() {
  return (
    <div class="introduction">
      <p class="display">A language model on your own device</p>
      <p>
        It is downloaded once and then runs in this browser, also without a network. What you write
        stays here.
      </p>
    </div>
  );
}

function Greeting({ engine }: { readonly engine: EngineState }) {
  return (
    <div class="introduction">
      <p class="display">What would you like to know?</p>
      <p>
        {engine.phase === "server"
          ? `${engine.name} answers from this host’s server.`
          : "The model runs in this browser. What you write stays here."}
      </p>
    </div>
  );
}

function ModelChip({ engine, onClick }: { engine: EngineState; onClick: () => void }) {
  const label = ((): string => {
    switch (engine.phase) {
      case "starting":
        return "Starting…";
      case "idle":
        return "No model";
      case "loading":
        return `${engine.model.name}…`;
      case "ready":
        return engine.model.name;
      case "server":
        return engine.name;
    }
  })();
  const detail =
    engine.phase === "ready" ? engine.precision : engine.phase === "server" ? "server" : null;
  return (
    <button type="button" class={`chip ${engine.phase}`} onClick={onClick}>
      <Icon name="chip" />
      <span>{label}</span>
      {detail !== null && <small>{detail}</small>}
    </button>
  );
}

const ACTION_LABELS: Readonly<Record<NoticeAction, string>> = {
  retry: "Try again",
  without_storing: "Run without storing",
  remove_others: "Remove other models",
};

function NoticeBar({ store, models }: Omit<AppProps, "chat">) {
  const { notice } = store.state;
  const act = (action: NoticeAction): void => {
    store.set({ notice: null });
    if (action === "without_storing") void models.start({ keep: "memory" });
    else if (action === "remove_others") void models.removeOthers().then(() => models.start());
    else void models.start();
  };
  return (
    <div role="alert">
      {notice !== null && (
        <div class={`notice ${notice.kind}`}>
          <p>{notice.text}</p>
          {notice.actions.map((action) => (
            <button type="button" class="button" key={action} onClick={() => act(action)}>
              {ACTION_LABELS[action]}
            </button>
          ))}
          <IconButton icon="close" label="Dismiss" onClick={() => store.set({ notice: null })} />
        </div>
      )}
    </div>
  );
}

function save(name: string, text: string): void {
  const url = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
