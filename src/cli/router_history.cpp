#include "cli/router_history.h"

namespace kindred::cli {

void HistoryArguments::add_to(ConfigSchema& schema) {
  schema.list("history_shape", &history_shapes,
              "SGLang: choose decode workers by the experts that prompts which begin alike have used; of the model, "
              "[MODEL=]LAYERSxEXPERTSxTOP_K, such as 48x128x8 (num_hidden_layers, num_experts, num_experts_per_tok)");
  schema.integer("history_bytes", &history_bytes, 1 << 20, 64LL << 30,
                 "history: of counts kept, two for each expert and layer of a prefix");
  schema.real("history_sample", &history_sample, 0, 1,
              "history: share of the requests with unknown prompts whose prefill server is asked for the experts");
  schema.real("history_least_share", &history_least_share, 0, 1,
              "history: of a prompt that must be known; else load alone decides");
}

void HistoryArguments::apply(router::RouterOptions& out) const {
  out.history.shapes = history_shapes;
  out.history.bytes = static_cast<size_t>(history_bytes);
  out.history.sample = history_sample;
  out.history.least_share = history_least_share;
}

}  // namespace kindred::cli
