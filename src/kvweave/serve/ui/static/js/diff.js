// Which words of one text are not in the other, by longest common subsequence.

const MOST = 1200; // words of each text that are compared: the table is their product

export const words = (text) => text.match(/\s+|[^\s]+/g) ?? [];
const bare = (word) => word.toLowerCase().replace(/[^\p{L}\p{N}]/gu, "") || word;

const compared = (texts) => texts.flatMap(words).filter((word) => word.trim()).slice(0, MOST).map(
  bare);

/** For each of `texts`, in this order, its pieces { text, differs } against `bases`. */
export function marked(texts, bases) {
  const kept = common(compared(texts), compared(bases));
  let at = 0; // in the words of all texts
  const keeps = () => at < MOST && kept[at++];
  return texts.map((text) => piecesOf(words(text), keeps));
}

function piecesOf(all, keeps) {
  const pieces = [];
  for (const word of all) {
    const differs = word.trim() ? !keeps() : false;
    const last = pieces.at(-1);
    if (last && (last.differs === differs || (!word.trim() && !last.differs))) last.text += word;
    else pieces.push({ text: word, differs });
  }
  return joined(pieces);
}

/** A space between two words that differ belongs to them. */
function joined(pieces) {
  const out = [];
  pieces.forEach((piece, at) => {
    const gap = !piece.text.trim() && pieces[at - 1]?.differs && pieces[at + 1]?.differs;
    const differs = piece.differs || Boolean(gap);
    if (out.at(-1)?.differs === differs) out.at(-1).text += piece.text;
    else out.push({ text: piece.text, differs });
  });
  return out;
}

/** For each word of `a`, whether it is in the longest common subsequence with `b`. */
function common(a, b) {
  const width = b.length + 1;
  const table = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--) {
    for (let j = b.length - 1; j >= 0; j--) {
      table[i * width + j] = a[i] === b[j] ? table[(i + 1) * width + j + 1] + 1
        : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
    }
  }
  const kept = new Array(a.length).fill(false);
  for (let i = 0, j = 0; i < a.length && j < b.length;) {
    if (a[i] === b[j]) { kept[i] = true; i += 1; j += 1; }
    else if (table[(i + 1) * width + j] >= table[i * width + j + 1]) i += 1;
    else j += 1;
  }
  return kept;
}
