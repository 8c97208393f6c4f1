// What the engine's tests share: the bundled model, loaded once, and a synchronous view of a job.
#pragma once

#include <ggml.h>
#include <gguf.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/metrics.h"
#include "base/rng.h"
#include "engine/engine.h"

namespace kindred::engine::test {

inline std::string model_path() { return std::string(KINDRED_SOURCE_DIR) + "/models/kindred-tiny-moe-q8_0.gguf"; }

inline const Model& bundled_model() {
  static const std::unique_ptr<Model> model = [] {
    auto loaded = Model::load(model_path());
    if (!loaded) {
      std::fprintf(stderr, "%s\n", loaded.error().message.c_str());
      std::abort();
    }
    return std::move(loaded).value();
  }();
  return *model;
}

inline const SystemClock& system_clock() {
  static const SystemClock clock;
  return clock;
}

// An engine of its own with its own metrics.
class TestEngine {
 public:
  explicit TestEngine(EngineOptions options = small(), const Model& model = bundled_model()) {
    auto started = Engine::start(model, options, system_clock(), metrics_);
    if (!started) {
      ADD_FAILURE() << started.error().message;
      return;
    }
    engine_ = std::move(started).value();
  }

  static EngineOptions small() {
    EngineOptions options;
    options.context_tokens = 1024;
    options.kv_tokens = 4096;
    options.sequences = 8;
    options.token_budget = 128;
    options.threads = 1;
    return options;
  }

  Engine* operator->() { return engine_.get(); }
  Engine& operator*() { return *engine_; }

  // The value of a metric without labels other than the model's name (or with one more, given).
  double metric(const std::string& name, const std::string& label = "") const {
    const std::string text = metrics_.render();
    for (size_t at = text.find("\n" + name); at != std::string::npos; at = text.find("\n" + name, at + 1)) {
      const size_t end = text.find('\n', at + 1);
      const std::string line = text.substr(at + 1, end - at - 1);
      const char behind = line[name.size()];
      if ((behind != '{' && behind != ' ') || line.find(label) == std::string::npos) continue;
      return std::stod(line.substr(line.rfind(' ') + 1));
    }
    ADD_FAILURE() << "no metric " << name;
    return -1;
  }

 private:
  Registry metrics_;
  std::unique_ptr<Engine> engine_;
};

// Everything a job said.
struct Said {
  std::map<uint32_t, std::vector<Token>> tokens;  // by choice
  std::map<uint32_t, std::string> text;
  std::map<uint32_t, FinishReason> ends;
  std::vector<Output> outputs;
  std::optional<PrefillDone> prefill;
  std::optional<Finished> finished;
  std::optional<Error> error;
  bool over = false;
  int events_behind_end = 0;
};

class Listener {
 public:
  explicit Listener(Job::Kind kind) : kind_(kind) {}

  void take(Event event) {
    const std::lock_guard lock(mutex_);
    if (said_.over) ++said_.events_behind_end;
    if (auto* output = std::get_if<Output>(&event)) {
      said_.tokens[output->choice].push_back(output->token);
      said_.text[output->choice] += output->text;
      said_.outputs.push_back(std::move(*output));
    } else if (auto* end = std::get_if<ChoiceEnd>(&event)) {
      said_.text[end->choice] += end->text;
      said_.ends[end->choice] = end->reason;
    } else if (auto* done = std::get_if<PrefillDone>(&event)) {
      said_.prefill = std::move(*done);
      said_.over = kind_ == Job::Kind::kPrefill;
    } else if (auto* finished = std::get_if<Finished>(&event)) {
      said_.finished = std::move(*finished);
      said_.over = true;
    } else {
      said_.error = std::get<Error>(std::move(event));
      said_.over = true;
    }
    changed_.notify_all();
  }

  Said wait() {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(120), [this] { return said_.over; })) {
      ADD_FAILURE() << "the job did not end";
    }
    return said_;
  }
  size_t tokens() {
    const std::lock_guard lock(mutex_);
    return said_.outputs.size();
  }
  // Returns once `count` tokens are out or the job is over.
  void wait_tokens(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(120), [&] { return said_.over || said_.outputs.size() >= count; });
  }

 private:
  const Job::Kind kind_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Said said_;
};

struct Submitted {
  std::shared_ptr<Listener> listener;
  JobId id = 0;
  Said wait() { return listener->wait(); }
};

inline Submitted submit(Engine& engine, Job job) {
  Submitted submitted{std::make_shared<Listener>(job.kind), 0};
  job.on_event = [listener = submitted.listener](Event event) { listener->take(std::move(event)); };
  auto id = engine.submit(std::move(job));
  if (!id) {
    submitted.listener->take(id.error());
  } else {
    submitted.id = *id;
  }
  return submitted;
}

inline Said run(Engine& engine, Job job) { return submit(engine, std::move(job)).wait(); }

inline Job make_job(std::vector<Token> prompt, uint32_t max_tokens, double temperature = 0, uint64_t seed = 1,
                    uint32_t choices = 1) {
  Job job;
  job.prompt = std::move(prompt);
  job.max_tokens = max_tokens;
  job.sampling.temperature = temperature;
  for (uint32_t c = 0; c < choices; ++c) {
    ChoiceState state;
    state.seed = seed + c;
    job.choices.push_back(std::move(state));
  }
  return job;
}

inline Job make_job(const std::string& prompt, uint32_t max_tokens, double temperature = 0, uint64_t seed = 1,
                    uint32_t choices = 1) {
  return make_job(bundled_model().tokenize(prompt, false), max_tokens, temperature, seed, choices);
}

// The same job in two legs, as two workers would run it. Returns what the client saw of both.
inline Said run_handoff(Engine& prefill, Engine& decode, Job job) {
  Job first = job;
  first.kind = Job::Kind::kPrefill;
  Said said = run(prefill, first);
  if (said.error || !said.prefill || !said.prefill->kv) return said;
  Job second = std::move(job);
  second.kind = Job::Kind::kDecode;
  second.choices = said.prefill->choices;
  second.kv = said.prefill->kv;
  Said rest = run(decode, std::move(second));
  for (auto& [choice, tokens] : rest.tokens) {
    said.tokens[choice].insert(said.tokens[choice].end(), tokens.begin(), tokens.end());
  }
  for (auto& [choice, text] : rest.text) said.text[choice] += text;
  for (auto& [choice, reason] : rest.ends) said.ends[choice] = reason;
  said.finished = std::move(rest.finished);
  said.error = std::move(rest.error);
  return said;
}

// A dense model with the bundled one's vocabulary and random weights.
inline std::string write_dense_model(const std::string& path) {
  constexpr int64_t kWidth = 32, kFfn = 48, kLayers = 2, kHeads = 2, kVocabulary = 8192;
  gguf_context* source = gguf_init_from_file(model_path().c_str(), {.no_alloc = true, .ctx = nullptr});
  gguf_context* gguf = gguf_init_empty();
  gguf_set_kv(gguf, source);
  gguf_free(source);
  gguf_set_val_str(gguf, "general.architecture", "llama");
  gguf_set_val_str(gguf, "general.name", "dense");
  const auto number = [&](const char* key, uint32_t value) { gguf_set_val_u32(gguf, key, value); };
  number("llama.context_length", 256);
  number("llama.embedding_length", kWidth);
  number("llama.block_count", kLayers);
  number("llama.feed_forward_length", kFfn);
  number("llama.attention.head_count", kHeads);
  number("llama.vocab_size", kVocabulary);
  gguf_set_val_f32(gguf, "llama.attention.layer_norm_rms_epsilon", 1e-5F);

  ggml_context* tensors = ggml_init({.mem_size = 16U << 20, .mem_buffer = nullptr, .no_alloc = false});
  Rng rng(11);
  const auto add = [&](const std::string& name, int64_t columns, int64_t rows) {
    ggml_tensor* tensor = rows == 0 ? ggml_new_tensor_1d(tensors, GGML_TYPE_F32, columns)
                                    : ggml_new_tensor_2d(tensors, GGML_TYPE_F32, columns, rows);
    ggml_set_name(tensor, name.c_str());
    auto* values = static_cast<float*>(tensor->data);
    for (int64_t i = 0; i < ggml_nelements(tensor); ++i) {
      values[i] = rows == 0 ? 1.0F : static_cast<float>(rng.uniform() - 0.5);
    }
    gguf_add_tensor(gguf, tensor);
  };
  add("token_embd.weight", kWidth, kVocabulary);
  add("output_norm.weight", kWidth, 0);
  for (int64_t layer = 0; layer < kLayers; ++layer) {
    const std::string prefix = "blk." + std::to_string(layer) + ".";
    add(prefix + "attn_norm.weight", kWidth, 0);
    add(prefix + "ffn_norm.weight", kWidth, 0);
    for (const char* name : {"attn_q", "attn_k", "attn_v", "attn_output"})
      add(prefix + name + ".weight", kWidth, kWidth);
    add(prefix + "ffn_gate.weight", kWidth, kFfn);
    add(prefix + "ffn_up.weight", kWidth, kFfn);
    add(prefix + "ffn_down.weight", kFfn, kWidth);
  }
  EXPECT_TRUE(gguf_write_to_file(gguf, path.c_str(), false));
  gguf_free(gguf);
  ggml_free(tensors);
  return path;
}

}  // namespace kindred::engine::test
