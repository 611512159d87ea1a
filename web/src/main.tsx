import { render } from "preact";
import { createState } from "./app_state";
import { ChatController } from "./chat_controller";
import { newConversation } from "./history/conversation";
import { openHistory } from "./history/store";
import { ModelController } from "./model_controller";
import { applyTheme } from "./settings";
import { App } from "./ui/app";

const base = new URL("./", document.baseURI).href;
const store = createState(newConversation(Date.now()));
const models = new ModelController(store, base);
const chat = new ChatController(store, models);

applyTheme(store.state.settings.theme);
const root = document.getElementById("app");
if (root !== null) render(<App store={store} models={models} chat={chat} />, root);

void openHistory(() => void chat.refresh()).then((history) => chat.begin(history));
void models.begin();

if ("serviceWorker" in navigator && import.meta.env.PROD) {
  navigator.serviceWorker.register(new URL("sw.js", base)).catch(() => {
    // Without one the page still works, but not offline.
  });
}
