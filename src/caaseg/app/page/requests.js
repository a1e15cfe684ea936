// Requests to the app. Every failure is an Error with a message for the user.

export async function ask(address, options = {}) {
  const answer = await send(address, options);
  return answer.status === 204 ? null : answer.json();
}

export async function askBytes(address) {
  return new Uint8Array(await (await send(address)).arrayBuffer());
}

export function upload(file) {
  return ask(`/api/photos?name=${encodeURIComponent(file.name)}`, { method: "POST", body: file });
}

export function predictionAddress(photo, model, part, values) {
  return `/api/photos/${photo.id}/models/${model}${part}?${new URLSearchParams(values)}`;
}

async function send(address, options) {
  let answer;
  try {
    answer = await fetch(address, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The app does not answer; is it still running in its terminal?");
  }
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text;
  try { message = JSON.parse(text).message; } catch { /* not JSON */ }
  throw Object.assign(new Error(message), { status: answer.status });
}
