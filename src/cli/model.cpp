#include <fmt/format.h>

#include <cstdio>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/config.h"
#include "cli/commands.h"
#include "cli/terminal.h"
#include "engine/gguf_file.h"
#include "engine/quantize.h"
#include "engine/widen.h"

namespace kindred::cli {
namespace {

void print_json(const std::string& path, const engine::GgufSummary& model) {
  std::string layers;
  for (const uint32_t layer : model.experts.layers) layers += fmt::format("{}{}", layers.empty() ? "" : ",", layer);
  fmt::print(
      "{{\"path\":{},\"name\":{},\"architecture\":{},\"quantisation\":{},\"layers\":{},\"context_tokens\":{},"
      "\"tensors\":{},\"bytes\":{},\"experts\":{},\"top_k\":{},\"captured_layers\":[{}],\"fingerprint\":\"{}\"}}\n",
      json_string(path), json_string(model.name), json_string(model.architecture), json_string(model.quantisation),
      model.layers, model.context_tokens, model.tensors, model.file_bytes, model.experts.experts, model.experts.top_k,
      layers, model.fingerprint);
}

void print_text(const engine::GgufSummary& model) {
  fmt::print("name          {}\n", model.name);
  fmt::print("architecture  {}, {}\n", model.architecture, model.quantisation);
  fmt::print("layers        {}\n", model.layers);
  if (model.experts.experts == 0) {
    fmt::print("experts       none\n");
  } else {
    fmt::print("experts       {} a layer, top {}; {} layers captured\n", model.experts.experts, model.experts.top_k,
               model.experts.layers.size());
  }
  fmt::print("context       {} tokens\n", model.context_tokens);
  fmt::print("size          {:.1f} MB in {} tensors\n", static_cast<double>(model.file_bytes) / 1e6, model.tensors);
  fmt::print("fingerprint   {}\n", model.fingerprint);
}

int run_info(Args args) {
  std::vector<std::string> files;
  bool json = false;
  ConfigSchema schema("model info FILE", "Shows what a GGUF file says about its model, without loading the weights.");
  schema.positional("FILE", &files, 1, "GGUF file");
  schema.flag("json", &json, "print one JSON object");
  if (auto parsed = schema.parse_flags(args); !parsed) return fail("model", parsed.error(), 2);
  if (schema.help_requested()) {
    fmt::print("{}", schema.help());
    return 0;
  }
  if (files.empty()) return fail("model", invalid("which file? `kindred model info FILE`"), 2);
  const auto model = engine::inspect_gguf(files[0]);
  if (!model) return fail("model", model.error());
  if (json) {
    print_json(files[0], *model);
  } else {
    print_text(*model);
  }
  return 0;
}

int run_quantize(Args args) {
  std::vector<std::string> files;
  engine::QuantizeOptions options;
  int64_t threads = 0;
  ConfigSchema schema("model quantize IN OUT", "Writes a smaller GGUF file of the same model.");
  schema.positional("FILES", &files, 2, "GGUF file to read, GGUF file to write");
  schema.choice("type", &options.type, engine::quantisation_names(), "type of the weights");
  schema.text("name", &options.name, "the model's name in the new file (default: unchanged)");
  schema.integer("threads", &threads, 0, 1024, "0: all cores");
  if (auto parsed = schema.parse_flags(args); !parsed) return fail("model", parsed.error(), 2);
  if (schema.help_requested()) {
    fmt::print("{}", schema.help());
    return 0;
  }
  if (files.size() != 2) return fail("model", invalid("two files, please: `kindred model quantize IN OUT`"), 2);
  options.threads = static_cast<uint32_t>(threads);
  if (auto done = engine::quantize_gguf(files[0], files[1], options); !done) return fail("model", done.error());
  const auto model = engine::inspect_gguf(files[1]);
  if (!model) return fail("model", model.error());
  print_text(*model);
  return 0;
}

int run_widen(Args args) {
  std::vector<std::string> files;
  engine::WidenOptions options;
  int64_t factor = options.factor;
  ConfigSchema schema("model widen IN OUT [--factor F]",
                      "Writes the same model with wider experts: neurons repeated F times, the down-projection divided "
                      "by F. It computes the same and has to read F times the bytes.");
  schema.positional("FILES", &files, 2, "GGUF file to read, GGUF file to write");
  schema.integer("factor", &factor, 1, 64, "a power of two");
  schema.choice("type", &options.type, engine::widened_types(), "type of the experts' weights");
  if (auto parsed = schema.parse_flags(args); !parsed) return fail("model", parsed.error(), 2);
  if (schema.help_requested()) {
    fmt::print("{}", schema.help());
    return 0;
  }
  if (files.size() != 2) return fail("model", invalid("two files, please: `kindred model widen IN OUT`"), 2);
  options.factor = static_cast<uint32_t>(factor);
  std::optional<Progress> progress;
  options.progress = [&](size_t done, size_t tensors) {
    if (!progress) progress.emplace("widening", tensors);
    progress->set(done);
  };
  const auto report = engine::widen_gguf(files[0], files[1], options);
  progress.reset();
  if (!report) return fail("model", report.error(), report.error().code == ErrorCode::kInvalid ? 2 : 1);
  const auto model = engine::inspect_gguf(files[1]);
  if (!model) return fail("model", model.error());
  print_text(*model);
  fmt::print("an expert     {} neurons instead of {}, {:.2f} MB\n", report->to_width, report->from_width,
             static_cast<double>(report->expert_bytes) / 1e6);
  if (report->inexact > 0) {
    fmt::print("inexact       {} weights (Q8_0: blocks of 32) are too small to be divided by {} exactly\n",
               report->inexact, factor);
  }
  return 0;
}

}  // namespace

int run_model(Args args) {
  const std::string_view what = args.empty() ? std::string_view() : args[0];
  if (what == "info") return run_info(args.subspan(1));
  if (what == "quantize") return run_quantize(args.subspan(1));
  if (what == "widen") return run_widen(args.subspan(1));
  const bool help = what == "--help" || what == "-h";
  if (!help && !what.empty()) fmt::print(stderr, "kindred model: got '{}', accepted: info, quantize, widen\n", what);
  fmt::print(help ? stdout : stderr,
             "usage: kindred model info FILE [--json]\n       kindred model quantize IN OUT [--type q8_0]\n"
             "       kindred model widen IN OUT [--factor 4] [--type f16]\n");
  return help ? 0 : 2;
}

}  // namespace kindred::cli
