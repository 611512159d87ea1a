/** Puts a text on the clipboard; false if the browser does not let the page. */
export async function copyText(text: string): Promise<boolean> {
  try {
    // Hidden on plain http.
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
