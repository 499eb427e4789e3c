// Runs a model in onnxruntime-web on its wasm backend, for importers.py. Without an argument it prints the version.
//
//     echo '{"name": "x", "type": "float32", "dims": [1, 2], "values": [1, 2]}' | node importer_web.mjs model.onnx
//
// The package is looked for in the node_modules of the working directory, and in NODE_PATH.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const ort = createRequire(join(process.cwd(), "any.js"))("onnxruntime-web");
const [model] = process.argv.slice(2);

if (model === undefined) {
  console.log(ort.env.versions.web);
} else {
  const { name, type, dims, values } = JSON.parse(readFileSync(0, "utf8"));
  const data = type === "int64" ? BigInt64Array.from(values, BigInt) : Float32Array.from(values);
  ort.env.wasm.numThreads = 1;
  const session = await ort.InferenceSession.create(readFileSync(model), { executionProviders: ["wasm"] });
  const results = await session.run({ [name]: new ort.Tensor(type, data, dims) });
  const output = results[session.outputNames[0]];
  console.log(JSON.stringify({ dims: output.dims, values: Array.from(output.data) }));
}
