// Reads columns packed by show/tensorboard/packing.py: a description and columns of numbers.

const MAGIC = "MPC1";
const MOST_BYTES = 2 ** 30; // inflated; stored columns are about a hundred times smaller

/**
 * @typedef {Object} Unpacked
 * @property {any} meta description of the columns
 * @property {Map<string, Float64Array>} columns name → values
 */

/**
 * Inflate and decode packed columns.
 * @param {ArrayBuffer} packed
 * @returns {Promise<Unpacked>}
 */
export async function unpackColumns(packed) {
  try {
    return decodeColumns(await inflate(packed));
  } catch (error) {
    throw new Error(`These columns are damaged: ${error instanceof Error ? error.message : error}.`);
  }
}

/** @param {ArrayBuffer} packed */
async function inflate(packed) {
  const chunks = [];
  let size = 0;
  const inflated = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const reader = inflated.getReader();
  for (let chunk = await reader.read(); !chunk.done; chunk = await reader.read()) {
    chunks.push(chunk.value);
    size += chunk.value.length;
    if (size > MOST_BYTES) {
      await reader.cancel();
      throw new Error("too large for a browser");
    }
  }
  return new Uint8Array(await new Blob(chunks).arrayBuffer());
}

/**
 * @param {Uint8Array} raw
 * @returns {Unpacked}
 */
export function decodeColumns(raw) {
  const text = new TextDecoder();
  if (text.decode(raw.subarray(0, 4)) !== MAGIC) throw new Error("wrong start");
  const length = new DataView(raw.buffer, raw.byteOffset).getUint32(4, true);
  const { meta, columns } = JSON.parse(text.decode(raw.subarray(8, 8 + length)));
  const unpacked = new Map();
  let place = 8 + length;
  for (const { name, kind, count, bytes } of columns) {
    const data = raw.subarray(place, place + bytes);
    if (data.length !== bytes || count > bytes) throw new Error(`column ${name} is cut off`);
    unpacked.set(name, kind === "float" ? doubles(data, count) : integers(data, count, kind === "delta"));
    place += bytes;
  }
  return { meta, columns: unpacked };
}

/**
 * @param {Uint8Array} data
 * @param {number} count
 */
function doubles(data, count) {
  return new Float64Array(data.slice().buffer, 0, count); // a copy is aligned for doubles
}

/**
 * LEB128 after zigzag. Uses sums and products, because shifts only have 32 bits.
 * @param {Uint8Array} data
 * @param {number} count
 * @param {boolean} isDelta
 */
function integers(data, count, isDelta) {
  const values = new Float64Array(count);
  let place = 0;
  let before = 0;
  for (let index = 0; index < count; index += 1) {
    let byte = data[place++];
    const isOdd = byte & 1; // the lowest bit is the sign
    let half = (byte & 0x7f) >> 1;
    let scale = 64;
    while (byte & 0x80) {
      byte = data[place++];
      half += (byte & 0x7f) * scale;
      scale *= 128;
    }
    const value = isOdd ? -half - 1 : half;
    before = isDelta ? before + value : value;
    values[index] = before;
  }
  return values;
}
