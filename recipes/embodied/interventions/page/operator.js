"use strict";
// The page of an operator: keys, buttons and a gamepad are sent 20 times a second, pictures are drawn as they come.
const PERIOD = 50, OLD = 0.5, AGE_PERIOD = 250, RETRY = 1000;
const MOVES = "wsadrfoukijl";
const PRESSES = { KeyG: "gripper", KeyE: "reward", KeyY: "success", KeyN: "failure", KeyX: "discard" };
const PAD_PRESSES = { 0: "gripper", 2: "discard", 3: "reward", 8: "failure", 9: "success" };
const TOKEN_WRONG = 4401, FINAL = { 4401: "The token is wrong", 4408: "Somebody else has taken over", 4409: "Somebody else is steering" };
const WHO = { you: "You steer", policy: "The policy acts", waiting: "Waiting for you: hold to steer and move" };
const $ = (id) => document.getElementById(id);

let socket = null, token = "", steers = false, timer = 0;
let held = new Set(), pressed = new Set(), enablers = new Set(), padDown = new Set();
const cameras = new Map();

function say(text, kind = "") {
  if ($("status").textContent !== text) $("status").textContent = text;
  $("status").className = kind;
}

function release() {
  held.clear(); pressed.clear(); enablers.clear();
  for (const button of document.querySelectorAll(".down")) button.classList.remove("down");
  send();
}

function send() {
  $("enable").setAttribute("aria-pressed", String(enablers.size > 0));
  if (!steers || socket.readyState !== WebSocket.OPEN) return;
  const pad = readPad();
  socket.send(JSON.stringify({ enabled: enablers.size > 0 || pad.enabled, keys: [...held], pressed: [...pressed], pad: pad.axes }));
  pressed.clear();
}

// A gamepad of the standard layout: the right shoulder button enables.
function readPad() {
  const pads = navigator.getGamepads ? [...navigator.getGamepads()] : [];
  const pad = pads.find((one) => one && one.connected && one.mapping === "standard");
  $("gamepad").textContent = pad ? `Gamepad: ${pad.id.slice(0, 60)}; hold the right shoulder button to steer.`
    : isSecureContext ? "No gamepad: connect one and press a button of it."
    : "No gamepad: browsers give one only to a page on this computer. Open this page through the tunnel.";
  if (!pad || document.hidden || !document.hasFocus()) { padDown.clear(); return { axes: null, enabled: false }; }
  for (const [index, name] of Object.entries(PAD_PRESSES)) {
    const down = pad.buttons[index].pressed;
    if (down && !padDown.has(index)) pressed.add(name);
    if (down) padDown.add(index); else padDown.delete(index);
  }
  const bounded = (value) => Math.max(-1, Math.min(1, Number(value) || 0));
  const axes = [...pad.axes.slice(0, 4), pad.buttons[6].value, pad.buttons[7].value, pad.buttons[15].value - pad.buttons[14].value];
  return { axes: axes.map(bounded), enabled: pad.buttons[5].pressed };
}

function connect() {
  clearInterval(timer);
  say("Connecting…");
  const mine = socket = new WebSocket(`ws://${location.host}/operate`);
  mine.binaryType = "arraybuffer";
  mine.onopen = () => mine.send(JSON.stringify({ token }));
  mine.onmessage = (event) => { if (mine === socket) (typeof event.data === "string" ? hear(JSON.parse(event.data)) : draw(event.data)); };
  mine.onclose = (event) => { if (mine === socket) lost(event.code); };
}

function hear(message) {
  if (message.ok === true) {
    steers = true;
    $("door").hidden = true; $("desk").hidden = false; $("enable").focus();
    timer = setInterval(send, Math.min(PERIOD, 1000 / message.hz));
  } else if (message.state) {
    const state = message.state;
    if (state.acts) say(WHO[state.acts], state.acts);
    else say("Connected");
    if (state.acts) {
      $("episode").textContent = `${state.reset + state.episode}, step ${state.step}`;
      $("gripper").textContent = state.gripper_closed ? "closed" : "open";
    }
    if (message.delay !== null) $("delay").textContent = `${Math.round(1000 * message.delay)} ms`;
  }
}

function lost(code) {
  const connected = steers;
  steers = false;
  clearInterval(timer);
  release();
  if (connected && !FINAL[code]) {
    say("The connection is lost; the arm is held. Trying again…", "fault");
    setTimeout(connect, RETRY);
    return;
  }
  say(FINAL[code] ? `${FINAL[code]}. Connect to try again.` : "The run does not answer.", "fault");
  $("door").hidden = false; $("desk").hidden = true;
  if (code === TOKEN_WRONG) { $("token").value = token = ""; }
  $("token").focus();
}

function draw(data) {
  const size = new DataView(data).getUint32(0);
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, size)));
  let view = cameras.get(head.camera);
  if (!view) {
    const figure = document.createElement("figure"), image = document.createElement("img"), caption = document.createElement("figcaption");
    const name = document.createElement("span"), age = document.createElement("span");
    image.alt = `Picture of camera ${head.camera}`;
    name.textContent = name.title = head.camera;
    caption.append(name, age);
    figure.append(image, caption);
    $("cameras").append(figure);
    cameras.set(head.camera, view = { figure, image, told: age, url: "" });
  }
  const url = URL.createObjectURL(new Blob([new Uint8Array(data, 4 + size)], { type: "image/jpeg" }));
  const from = socket;
  view.image.onload = () => {
    if (view.url) URL.revokeObjectURL(view.url);
    view.url = url; view.age = head.age; view.came = performance.now(); view.count = (view.count || 0) + 1;
    tellAge(view);
    if (from === socket && socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify({ shown: head.number }));
  };
  view.image.src = url;
}

function tellAge(view) {
  const age = view.age + (performance.now() - view.came) / 1000, old = age > OLD;
  const text = age < 1 ? `${Math.round(1000 * age)} ms` : `${age.toFixed(age < 10 ? 1 : 0)} s`;
  view.told.textContent = `${text} old${old ? " – not live" : ""}`;
  view.figure.classList.toggle("old", old);
}
setInterval(() => cameras.forEach((view) => { if (view.came) tellAge(view); }), AGE_PERIOD);

function typing(event) { return !steers || event.ctrlKey || event.metaKey || event.altKey; }
addEventListener("keydown", (event) => {
  if (typing(event)) return;
  const letter = event.code.startsWith("Key") ? event.code.slice(3).toLowerCase() : "";
  if (event.key === "Shift") enablers.add(event.code);
  else if (MOVES.includes(letter) && letter) held.add(letter);
  else if (PRESSES[event.code]) { if (!event.repeat) pressed.add(PRESSES[event.code]); }
  else return;
  event.preventDefault();
  if (!event.repeat) send();
});
addEventListener("keyup", (event) => {
  if (event.key === "Shift") enablers.delete(event.code);
  else if (event.code.startsWith("Key")) held.delete(event.code.slice(3).toLowerCase());
  else return;
  send();
});
addEventListener("blur", release);
document.addEventListener("visibilitychange", () => { if (document.hidden) release(); });

// A button that acts as long as it is held: by pointer, or by Space or Enter while it has the focus.
function holdable(button, down, up) {
  let byKey = false;
  const begin = (event, key) => { event.preventDefault(); byKey = key; button.classList.add("down"); down(); send(); };
  const end = () => { if (button.classList.contains("down")) { button.classList.remove("down"); up(); send(); } };
  button.addEventListener("pointerdown", (event) => { button.setPointerCapture(event.pointerId); begin(event, false); });
  for (const name of ["pointerup", "pointercancel", "lostpointercapture"]) button.addEventListener(name, end);
  button.addEventListener("blur", () => { if (byKey) end(); });
  button.addEventListener("keydown", (event) => { if (["Space", "Enter"].includes(event.code) && !event.repeat) begin(event, true); });
  button.addEventListener("keyup", (event) => { if (["Space", "Enter"].includes(event.code)) end(); });
  button.addEventListener("contextmenu", (event) => event.preventDefault());
}
holdable($("enable"), () => enablers.add("button"), () => enablers.delete("button"));
for (const button of document.querySelectorAll("[data-key]"))
  holdable(button, () => held.add(button.dataset.key), () => held.delete(button.dataset.key));
for (const button of document.querySelectorAll("[data-press]"))
  button.addEventListener("click", () => { pressed.add(button.dataset.press); send(); });

$("door").addEventListener("submit", (event) => { event.preventDefault(); token = $("token").value.trim(); connect(); });
if (location.hash.length > 16) {
  token = decodeURIComponent(location.hash.slice(1));
  history.replaceState(null, "", location.pathname);
  connect();
}
