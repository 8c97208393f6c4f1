// What llama.cpp has once per process: its backends and its log.
//
// Thread-safety: safe from any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

struct ggml_threadpool;

namespace kindred::engine {

// Registers the backends and sends llama.cpp's warnings and errors to our log. Call before any other
// use of llama.cpp; later calls do nothing.
void init_llama();

// While it lives, error lines that llama.cpp logs on this thread go here and not to the log: llama.cpp says
// only there why it returns a null pointer, and the Error made of it is reported already. Not nestable.
class LlamaErrors {
 public:
  LlamaErrors();
  ~LlamaErrors();
  LlamaErrors(const LlamaErrors&) = delete;
  LlamaErrors& operator=(const LlamaErrors&) = delete;

  // All lines so far, joined by "; ".
  const std::string& text() const { return text_; }
  void add(const std::string& line);

 private:
  std::string text_;
};

struct FreeComputePool {
  void operator()(ggml_threadpool* pool) const;
};
// ggml's threads, made once: it would make and end them with each graph, or part of one.
using ComputePool = std::unique_ptr<ggml_threadpool, FreeComputePool>;
ComputePool make_compute_pool(uint32_t threads);

// Whether llama.cpp was built with a GPU backend and found a device.
bool has_gpu();

}  // namespace kindred::engine
