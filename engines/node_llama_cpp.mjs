// Runs llama.cpp through node-llama-cpp; reads and writes the same JSON lines as program.py.
//
//     node node_llama_cpp.mjs '<options as JSON>'
//
// Options: those common to all programs in program.py except settings, and package (the folder of node_modules). With
// at_once, lines and answers are those of at_once.py.

import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";
import {join} from "node:path";

const options = JSON.parse(process.argv[2]);
const write = process.stdout.write.bind(process.stdout);
const say = (answer) => write(JSON.stringify(answer) + "\n");
process.stdout.write = process.stderr.write.bind(process.stderr); // The library's output goes to stderr.

try {
    const entry = join(options.package, "node_modules", "node-llama-cpp", "dist", "index.js");
    const {getLlama, DraftSequenceTokenPredictor, InputLookupTokenPredictor} = await import(pathToFileURL(entry));
    const gpu = options.device === "cuda" ? "cuda" : false;
    const settings = {gpu, maxThreads: options.threads, build: "never", progressLogs: false};
    const llama = await getLlama(settings).catch((error) => {
        console.error(error);
        const needed = "it needs NVIDIA's driver, and libcudart and libcublas where the system looks for libraries";
        throw gpu ? new Error(`llama.cpp's build for CUDA does not load: ${needed}`) : error;
    });
    const sequences = options.at_once ?? 1;
    const batchSize = options.at_once ? 512 : options.n_ctx; // 512: llama.cpp's own default for a physical batch.
    const room = {contextSize: options.n_ctx, threads: options.threads, batchSize, sequences};
    const mapped = options.at_once ? {} : {useMmap: false}; // Mapped weights could be evicted between turns.
    const load = (modelPath) => llama.loadModel({modelPath, ...mapped, ...(gpu ? {gpuLayers: "max"} : {})});
    const context = await (await load(options.model)).createContext(room);
    let tokenPredictor;
    if (options.draft) {
        const drafting = await (await load(options.draft)).createContext(room);
        const maxTokens = options.draft_tokens, minConfidence = options.min_confidence;
        // The draft model runs in parallel to the target: without a minimum length, a target pass takes the tokens
        // drafted so far, perhaps none.
        const minTokens = minConfidence > 0 ? 0 : maxTokens;
        tokenPredictor = new DraftSequenceTokenPredictor(drafting.getSequence(), {minTokens, maxTokens, minConfidence});
    } else if (options.ngram) {
        tokenPredictor = new InputLookupTokenPredictor({
            patternLength: {min: 1, max: options.ngram_tokens},
            predictionLength: {min: 1, max: options.draft_tokens}
        });
    }
    const sequence = context.getSequence({tokenPredictor});
    const counts = () => {
        const {validated, refuted} = sequence.tokenPredictions;
        return {drafted: validated + refuted, accepted: validated};
    };
    const decode = async (own, asked, begun) => {
        let firstAt = null;
        const tokenIds = [];
        for await (const token of own.evaluate(asked.prompt_ids, {temperature: 0, yieldEogToken: true})) {
            firstAt ??= performance.now();
            tokenIds.push(token);
            if (tokenIds.length === asked.max_new_tokens)
                break;
        }
        const lastS = (performance.now() - begun) / 1000;
        return {tokenIds, firstS: firstAt === null ? null : (firstAt - begun) / 1000, lastS};
    };
    const all = [sequence, ...Array.from({length: sequences - 1}, () => context.getSequence())];
    say({ready: true});
    for await (const line of createInterface({input: process.stdin})) {
        const asked = JSON.parse(line);
        const before = counts();
        const begun = performance.now();
        await Promise.all(all.map((own) => own.clearHistory()));
        if (asked.requests) {
            const done = await Promise.all(asked.requests.map((own, i) => decode(all[i], own, begun)));
            const answers = done.map((own) => ({token_ids: own.tokenIds, first_s: own.firstS, last_s: own.lastS}));
            say({answers, seconds: (performance.now() - begun) / 1000});
            continue;
        }
        tokenPredictor?.updateInputTokens?.(asked.prompt_ids); // Prompt lookup needs the prompt's tokens explicitly.
        const {tokenIds, firstS, lastS} = await decode(sequence, asked, begun);
        const answer = {token_ids: tokenIds, seconds: lastS, prefill_s: firstS};
        const after = counts();
        const drafts = {drafted: after.drafted - before.drafted, accepted: after.accepted - before.accepted};
        say({...answer, ...(tokenPredictor ? drafts : {})});
    }
    process.exit(0);
} catch (error) {
    say({error: `${error.name}: ${String(error.message).replace(/\s+/g, " ").slice(0, 300)}`});
    console.error(error);
    process.exit(1);
}
