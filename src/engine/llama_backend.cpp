#include "engine/llama_backend.h"

#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <llama.h>

#include <mutex>
#include <string_view>
#include <utility>

#include "base/log.h"

namespace kindred::engine {
namespace {

thread_local LlamaErrors* errors_of_this_thread = nullptr;

// llama.cpp has one log per process, so what catches it is one per process too.
class LlamaLog {
 public:
  static LlamaLog& instance() {
    static LlamaLog log;
    return log;
  }

  static void receive(ggml_log_level level, const char* text, void* self) {
    static_cast<LlamaLog*>(self)->add(level, text);
  }

 private:
  void add(ggml_log_level level, std::string_view text) {
    const std::lock_guard lock(mutex_);
    // Lines come in pieces: the first with a level, the rest with CONT.
    if (level != GGML_LOG_LEVEL_CONT) level_ = level;
    if (level_ != GGML_LOG_LEVEL_WARN && level_ != GGML_LOG_LEVEL_ERROR) return;
    line_ += text;
    if (line_.empty() || line_.back() != '\n') return;
    line_.pop_back();
    const std::string line = std::exchange(line_, {});
    // Meant for one sequence of n_ctx tokens; ours share it, each no longer than the model was trained for.
    if (line.find("possible training context overflow") != std::string::npos) return;
    if (level_ == GGML_LOG_LEVEL_WARN) {
      logger_.warn("{}", line);
    } else if (errors_of_this_thread != nullptr) {
      errors_of_this_thread->add(line);
    } else {
      logger_.error("{}", line);
    }
  }

  std::mutex mutex_;
  Logger logger_{"llama.cpp", LogLevel::kWarn};
  ggml_log_level level_ = GGML_LOG_LEVEL_NONE;
  std::string line_;
};

}  // namespace

void init_llama() {
  static std::once_flag once;
  std::call_once(once, [] {
    llama_log_set(LlamaLog::receive, &LlamaLog::instance());
    llama_backend_init();
  });
}

void FreeComputePool::operator()(ggml_threadpool* pool) const { ggml_threadpool_free(pool); }

ComputePool make_compute_pool(uint32_t threads) {
  ggml_threadpool_params params = ggml_threadpool_params_default(static_cast<int>(threads));
  params.poll = 0;
  return ComputePool(ggml_threadpool_new(&params));
}

bool has_gpu() {
  init_llama();
  return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_GPU) != nullptr;
}

LlamaErrors::LlamaErrors() { errors_of_this_thread = this; }

LlamaErrors::~LlamaErrors() { errors_of_this_thread = nullptr; }

void LlamaErrors::add(const std::string& line) {
  if (!text_.empty()) text_ += "; ";
  text_ += line;
}

}  // namespace kindred::engine
