// What the engine's tests share: the bundled model, loaded once, and a synchronous view of a job.
#pragma once

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

}  // namespace kindred::engine::test
