// `kindred record`: prompts through a worker (or a router), their expert counts into an activations
// file. Finished prompts are kept in OUTPUT.part as they come, so an interrupted run goes on where it
// stopped.

#include <fmt/format.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>

#include "base/bytes.h"
#include "base/config.h"
#include "base/json.h"
#include "base/rng.h"
#include "cli/chat_load.h"
#include "cli/commands.h"
#include "cli/prompts.h"
#include "cli/terminal.h"
#include "expert/activations.h"

namespace kindred::cli {
namespace {

struct RecordOptions {
  std::string url = "http://127.0.0.1:8100";
  std::string prompts;
  std::string output = "activations.safetensors";
  int64_t max_tokens = 48;
  int64_t concurrency = 8;
  double temperature = 0.8;
  int64_t seed = 1;
  bool gates = false;
};

struct Recorded {
  expert::ExpertCounts prompt;
  std::optional<expert::ExpertCounts> decode;
  std::optional<expert::ExpertGates> gates;
};
using RecordedByIndex = std::map<size_t, Recorded>;

struct Served {
  std::string model, fingerprint;
};

Result<Served> ask_model(const net::Endpoint& server) {
  Result<std::string> text = fetch(server, "/v1/models");
  if (!text) return std::move(text).error();
  const Json models = parse_json(*text);
  if (!models.is_object() || !models.contains("data") || !models["data"].is_array() || models["data"].empty()) {
    return Error{ErrorCode::kCorrupt, fmt::format("{}/v1/models: no model in the answer", server.url())};
  }
  const Json& first = models["data"][0];
  Served served;
  if (const auto id = first.find("id"); id != first.end() && id->is_string()) served.model = id->get<std::string>();
  if (const auto own = first.find("kindred"); own != first.end() && own->is_object()) {
    served.fingerprint = own->value("fingerprint", "");
  }
  return served;
}

// What makes a half-finished file fit this run: the model, the prompts and the sampling.
std::string run_key(const RecordOptions& options, const Served& served, const std::vector<Prompt>& prompts) {
  uint64_t hash = mix64(static_cast<uint64_t>(options.seed) ^ mix64(static_cast<uint64_t>(options.max_tokens)));
  hash = mix64(hash ^ static_cast<uint64_t>(options.temperature * 1e6));
  hash = mix64(hash ^ static_cast<uint64_t>(options.gates));
  for (const Prompt& prompt : prompts) {
    for (const char c : prompt.domain + '\0' + prompt.text + '\0') hash = mix64(hash ^ static_cast<unsigned char>(c));
  }
  return served.model + " " + served.fingerprint + " " + hex64(hash);
}

// Lines that are whole and belong to this run; a line that was cut when the last run died is dropped.
RecordedByIndex load_part(const std::string& path, const std::string& key) {
  RecordedByIndex done;
  std::ifstream in(path);
  std::string line;
  if (!std::getline(in, line) || line != key) return done;
  while (std::getline(in, line)) {
    const Json entry = parse_json(line);
    if (!entry.is_object() || !entry.contains("i") || !entry["i"].is_number_unsigned() || !entry.contains("prompt"))
      continue;
    Result<expert::ExpertCounts> prompt = expert::counts_from_json(dump_json(entry["prompt"]));
    if (!prompt) continue;
    Recorded recorded{std::move(*prompt), std::nullopt, std::nullopt};
    if (entry.contains("decode")) {
      Result<expert::ExpertCounts> decode = expert::counts_from_json(dump_json(entry["decode"]));
      if (!decode) continue;
      recorded.decode = std::move(*decode);
    }
    if (entry.contains("gates")) {
      Result<expert::ExpertGates> gates = expert::gates_from_json(dump_json(entry["gates"]));
      if (!gates) continue;
      recorded.gates = std::move(*gates);
    }
    done.insert_or_assign(entry["i"].get<size_t>(), std::move(recorded));
  }
  return done;
}

std::string part_line(size_t index, const Recorded& recorded) {
  std::string line = fmt::format("{{\"i\":{},\"prompt\":{}", index, expert::counts_to_json(recorded.prompt));
  if (recorded.decode) line += ",\"decode\":" + expert::counts_to_json(*recorded.decode);
  if (recorded.gates) line += ",\"gates\":" + expert::gates_to_json(*recorded.gates);
  return line + "}\n";
}

// Sends what is not in `done` yet, adding each answer to it and to the part file.
Status record_rest(const RecordOptions& options, const net::Endpoint& server, const std::string& model,
                   const std::vector<Prompt>& prompts, std::ofstream& part, RecordedByIndex& done) {
  std::vector<ChatCall> calls;
  std::vector<size_t> index_of;
  for (size_t i = 0; i < prompts.size(); ++i) {
    if (done.contains(i)) continue;
    ChatCall call;
    call.id = fmt::format("record-{}", i);
    call.prompt = prompts[i].text;
    call.max_tokens = options.max_tokens;
    call.temperature = options.temperature;
    call.seed = options.seed + static_cast<int64_t>(i);
    call.ignore_eos = true;
    call.expert_counts = true;
    call.expert_gates = options.gates;
    calls.push_back(std::move(call));
    index_of.push_back(i);
  }
  Progress progress("recording", prompts.size());
  progress.set(done.size());
  Status failed;
  LoadOptions load;
  load.model = model;
  load.concurrency = static_cast<size_t>(options.concurrency);
  load.on_answer = [&](size_t call, const ChatAnswer& answer) {
    if (!answer.status.ok()) {
      if (failed.ok()) failed = answer.status;
      return;
    }
    if (!answer.prompt_counts) {
      if (failed.ok())
        failed =
            Error{ErrorCode::kInvalid, "the server sends no expert counts (not an MoE model, or not a Kindred worker)"};
      return;
    }
    if (options.gates && !answer.gates) {
      if (failed.ok()) failed = Error{ErrorCode::kInvalid, "the server sends no gate probabilities (--gates)"};
      return;
    }
    const Recorded recorded{*answer.prompt_counts, answer.decode_counts, answer.gates};
    part << part_line(index_of[call], recorded) << std::flush;
    done.insert_or_assign(index_of[call], recorded);
    progress.set(done.size());
  };
  run_chats(server, calls, load);
  return failed;
}

Status write_activations(const std::string& path, const Served& served, const std::vector<Prompt>& prompts,
                         const RecordedByIndex& done) {
  expert::Activations activations;
  activations.model = served.model;
  activations.model_fingerprint = served.fingerprint;
  for (const auto& [index, recorded] : done) {
    const expert::ExpertCounts* decode = recorded.decode ? &*recorded.decode : nullptr;
    std::span<const float> gate;
    if (recorded.gates) {
      if (recorded.gates->layers != recorded.prompt.shape.layers) {
        return invalid("the server's gate sums are of other layers than its expert counts", "expert_gates");
      }
      gate = recorded.gates->data;
    }
    if (Status added = activations.append(recorded.prompt, decode, prompts[index].domain, gate); !added) return added;
  }
  return expert::save_activations(activations, path);
}

Status record(const RecordOptions& options) {
  if (options.prompts.empty())
    return invalid("--prompts is required: a JSONL file with a \"prompt\" on each line", "prompts");
  Result<net::Endpoint> server = net::parse_endpoint(options.url);
  if (!server) return std::move(server).error();
  Result<std::vector<Prompt>> prompts = load_prompts(options.prompts);
  if (!prompts) return std::move(prompts).error();
  Result<Served> served = ask_model(*server);
  if (!served) return std::move(served).error();

  const std::string part_path = options.output + ".part";
  const std::string key = run_key(options, *served, *prompts);
  RecordedByIndex done = load_part(part_path, key);
  if (!done.empty())
    fmt::print(stderr, "  going on with {}: {} of {} prompts are there\n", part_path, done.size(), prompts->size());
  std::ofstream part(part_path, std::ios::trunc);
  part << key << "\n";
  for (const auto& [index, recorded] : done) part << part_line(index, recorded);
  part.flush();
  if (!part) return Error{ErrorCode::kIo, fmt::format("cannot write {}", part_path)};

  if (Status sent = record_rest(options, *server, served->model, *prompts, part, done); !sent) {
    return Error{sent.error().code, fmt::format("{}; {} of {} prompts are kept in {}, run the command again to go on",
                                                sent.error().message, done.size(), prompts->size(), part_path)};
  }
  if (Status written = write_activations(options.output, *served, *prompts, done); !written) return written;
  part.close();
  std::remove(part_path.c_str());
  fmt::print("{}: {} requests of {}\nnext: kindred fit {} --workers N --output cohorts.safetensors\n", options.output,
             done.size(), served->model, options.output);
  return {};
}

}  // namespace

int run_record(Args args) {
  RecordOptions options;
  ConfigSchema schema("record --prompts FILE [--url URL] [--output FILE]",
                      "Sends prompts through a Kindred worker and keeps their expert counts, for `kindred fit`.");
  schema.text("url", &options.url, "the worker or router");
  schema.text("prompts", &options.prompts, "JSONL with \"prompt\" and, optionally, \"domain\"");
  schema.text("output", &options.output, "the activations file to write");
  schema.integer("max_tokens", &options.max_tokens, 2, 4096, "tokens to generate for each prompt");
  schema.integer("concurrency", &options.concurrency, 1, 1024, "requests at a time");
  schema.real("temperature", &options.temperature, 0, 2, "sampling temperature");
  schema.integer("seed", &options.seed, 0, 1LL << 40, "prompt i is sampled with seed + i");
  schema.flag("gates", &options.gates, "also keep the gates' probabilities; nothing is then taken from prefix caches");
  if (Status parsed = schema.parse_flags(args); !parsed) {
    return fail("record", parsed.error(), 2);
  }
  if (schema.help_requested()) {
    fmt::print("{}", schema.help());
    return 0;
  }
  if (Status done = record(options); !done) {
    return fail("record", done.error());
  }
  return 0;
}

}  // namespace kindred::cli
