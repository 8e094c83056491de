// Tensors as a tree by the dots in their names. Pure. Names are hostile: any length, any number of dots.

const DEEPEST = 24; // levels; the rest of a longer name stays in one piece
const bySize = new Intl.Collator("en", { numeric: true });

const isSick = (tensor) => Boolean(tensor.nan || tensor.inf || tensor.problem);

function parts(tensor) {
  const pieces = tensor.name.split(".", DEEPEST);
  const used = pieces.slice(0, -1).join(".").length;
  const last = pieces.length > 1 ? tensor.name.slice(used + 1) : tensor.name;
  return [...pieces.slice(0, -1), last];
}

const branch = (label, key) => ({ key, label, sortedBy: label.slice(0, 200), inner: new Map(), leaves: [], count: 0, sick: 0, largest: null });

/** The root of a tree. With several roles (model, optimizer, ...) these are the first level. */
export function buildTree(tensors) {
  const root = branch("", "");
  const many = new Set(tensors.map((tensor) => tensor.role)).size > 1;
  for (const [index, tensor] of tensors.entries()) {
    const names = parts(tensor);
    const label = names.pop();
    let node = note(root, tensor);
    for (const name of many ? [tensor.role || "other", ...names] : names) {
      if (!node.inner.has(name)) node.inner.set(name, branch(name, `${node.key}${name}\u0000`));
      node = note(node.inner.get(name), tensor);
    }
    node.leaves.push({ key: `#${index}`, label, sortedBy: label.slice(0, 200), tensor, index });
  }
  return settle(root);
}

function note(node, tensor) {
  node.count += 1;
  node.sick += isSick(tensor) ? 1 : 0;
  if (typeof tensor.largest === "number") node.largest = Math.max(node.largest ?? 0, tensor.largest);
  return node;
}

/** Sort each level, and join a branch that holds only one thing with it. */
function settle(root) {
  const waiting = [root];
  while (waiting.length) {
    const node = waiting.pop();
    const branches = [...node.inner.values()].map(joined);
    for (const inner of branches) if (!inner.tensor) waiting.push(inner);
    node.children = branches.concat(node.leaves).sort((a, b) => bySize.compare(a.sortedBy, b.sortedBy));
    node.inner = node.leaves = null;
  }
  return root;
}

function joined(node) {
  const labels = [node.label];
  while (!node.tensor && node.leaves.length + node.inner.size === 1) {
    [node] = [...node.inner.values(), ...node.leaves];
    labels.push(node.label);
  }
  return Object.assign(node, { label: labels.join("."), sortedBy: labels[0].slice(0, 200) });
}

/** The rows in sight: each node, and below one that is open what it holds. `level` begins at 1. */
export function openRows(root, open) {
  const rows = [];
  const waiting = root.children.map((node) => [node, 1]).reverse();
  while (waiting.length) {
    const [node, level] = waiting.pop();
    const isOpen = !node.tensor && open.has(node.key);
    rows.push({ node, level, open: isOpen });
    if (isOpen) for (const child of node.children.toReversed()) waiting.push([child, level + 1]);
  }
  return rows;
}

/** The keys to open so that the first tensor that is not finite is seen, else the first branch of each level. */
export function openAtFirst(root, most = 60) {
  const open = new Set();
  let node = root;
  for (let level = 0; node && !node.tensor && (root.sick || level < 3); level += 1) {
    if (node !== root) open.add(node.key);
    node = node.children.find((child) => (root.sick ? child.sick : child.children?.length <= most));
  }
  return open;
}

/** The tensors whose name holds each word of `wanted`, in lower case. */
export function matching(tensors, wanted, onlySick) {
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  if (!words.length && !onlySick) return tensors;
  return tensors.filter((t) => (!onlySick || isSick(t)) && words.every((w) => t.name.toLowerCase().includes(w)));
}
