// graphile-worker with a job for each POST: the settings that its documentation recommends for speed (local queue,
// batched completion), and kept-alive TLS connections of undici or of node:https.
// Speaks the line protocol of webhookd/devtools/processes.py.

import { readFileSync } from "node:fs";
import { Agent, request } from "node:https";
import { createInterface } from "node:readline";
import { Logger, makeWorkerUtils, run } from "graphile-worker";
import pg from "pg";
import { Pool } from "undici";

const POLL_INTERVAL_MILLISECONDS = 5;
const { dsn, url, ca_file, concurrency, payload_bytes, client } = JSON.parse(process.argv.at(-1));
const target = new URL(url);
const ca = readFileSync(ca_file);
const pool = new Pool(target.origin, { connections: concurrency, pipelining: 1, connect: { ca } });
const agent = new Agent({ keepAlive: true, maxSockets: concurrency, ca });
const clients = { undici: postByUndici, https: postByHttps };
const database = new pg.Pool({ connectionString: dsn, max: 10 });
let left = 0;

function payload(number) {
  const head = `{"number": ${number}, "padding": "`;
  return `${head}${"x".repeat(payload_bytes - head.length - 2)}"}`;
}

async function postByUndici(headers, body) {
  const answer = await pool.request({ method: "POST", path: target.pathname, headers, body });
  await answer.body.dump();
  return answer.statusCode;
}

function postByHttps(headers, body) {
  return new Promise((resolve, reject) => {
    const sending = request(
      target,
      { method: "POST", agent, headers: { ...headers, "content-length": Buffer.byteLength(body) } },
      (answer) => answer.resume().once("end", () => resolve(answer.statusCode)),
    );
    sending.once("error", reject).end(body);
  });
}

async function deliver({ body }, helpers) {
  const headers = {
    "user-agent": "webhookd/0.0.0",
    "content-type": "application/json",
    accept: "*/*",
    "accept-encoding": "identity",
    "webhook-id": `evt_${helpers.job.id}`,
    "webhook-timestamp": String(Math.floor(Date.now() / 1000)),
    "webhook-signature": "v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4=",
    "webhook-event-type": "bench.n0",
    "webhook-attempt": "1",
  };
  const status = await clients[client](headers, body);
  if (status !== 200) throw new Error(`the receiver answered ${status}`);
  left -= 1;
}

async function queueIsEmpty() {
  const { rows } = await database.query("select exists (select from graphile_worker._private_jobs) as more");
  return !rows[0].more;
}

async function deliverAll(utils, count) {
  left = count;
  await utils.addJobs(
    Array.from({ length: count }, (_, number) => ({ identifier: "deliver", payload: { body: payload(number) } })),
  );
  console.log(JSON.stringify("committed"));
  const started = performance.now();
  while (left > 0 || !(await queueIsEmpty())) {
    await new Promise((resolve) => setTimeout(resolve, POLL_INTERVAL_MILLISECONDS));
  }
  return (performance.now() - started) / 1000;
}

const settings = {
  pgPool: database,
  taskList: { deliver },
  // A log line for each job would be part of the measurement.
  logger: new Logger(() => () => {}),
  noHandleSignals: true,
  preset: {
    worker: {
      concurrentJobs: concurrency,
      localQueue: { size: 2 * concurrency + 100 },
      completeJobBatchDelay: 0,
      failJobBatchDelay: 0,
    },
  },
};
const utils = await makeWorkerUtils({ pgPool: database });
await utils.migrate();
const runner = await run(settings);
console.log(JSON.stringify("ready"));
for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await deliverAll(utils, JSON.parse(line))));
}
await runner.stop();
await utils.release();
await database.end();
await pool.close();
agent.destroy();
