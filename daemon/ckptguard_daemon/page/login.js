// Exchanges the secret of a link for the session's cookie. The secret leaves the address bar at once.
const said = document.getElementById("said");

async function isLoggedIn() {
  return (await fetch("v1/me", { cache: "no-store" })).ok;
}

async function logIn() {
  const token = location.hash.slice(1);
  history.replaceState(null, "", "login");
  try {
    const answer = await fetch("v1/session", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ token }),
    });
    const { error } = await answer.json();
    if (answer.ok || (await isLoggedIn())) {
      location.replace("./");
    } else if (answer.status === 401) {
      said.textContent = "This link was used, or has expired. Run `ckptguard dashboard` again for a new one.";
    } else {
      said.textContent = `${error.message}: ${error.hint ?? "open the link again"}.`;
    }
  } catch {
    said.textContent = "The daemon does not answer. Check that it runs, and open the link again.";
  }
}

if (location.hash.length > 1) {
  logIn();
} else {
  location.replace("./");
}
addEventListener("hashchange", logIn);
