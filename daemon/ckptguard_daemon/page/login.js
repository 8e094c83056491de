// Exchanges a token, or the secret of a link, for the session's cookie. The secret leaves the address bar at once.
const form = document.getElementById("login");
const said = document.getElementById("said");
const field = document.getElementById("token");

async function logIn(token) {
  said.className = "";
  said.textContent = "Logging in…";
  try {
    const answer = await fetch("/v1/session", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ token }),
    });
    if (answer.ok) {
      location.replace("/");
      return;
    }
    const { error } = await answer.json();
    said.textContent = error.hint ? `${error.message}: ${error.hint}.` : `${error.message}.`;
  } catch {
    said.textContent = "The daemon does not answer. Try again.";
  }
  said.className = "wrong";
  form.hidden = false;
  field.value = "";
  field.focus();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  logIn(field.value.trim());
});

function followLink() {
  const secret = location.hash.slice(1);
  if (secret) {
    history.replaceState(null, "", "/login");
    form.hidden = true;
    logIn(secret);
  }
}

addEventListener("hashchange", followLink);
followLink();
