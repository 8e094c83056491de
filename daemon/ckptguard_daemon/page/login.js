// Exchanges the secret of a link for the session's cookie. The secret leaves the address bar at once.
const said = document.getElementById("said");

async function logIn() {
  const token = location.hash.slice(1);
  history.replaceState(null, "", "login");
  if (!token) {
    location.replace("./");
    return;
  }
  try {
    const answer = await fetch("v1/session", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ token }),
    });
    if (answer.ok) {
      location.replace("./");
      return;
    }
    const { error } = await answer.json();
    said.textContent = error.hint ? `${error.message}: ${error.hint}.` : `${error.message}.`;
  } catch {
    said.textContent = "The daemon does not answer. Check that it runs, and open the link again.";
  }
}

addEventListener("hashchange", logIn);
logIn();
