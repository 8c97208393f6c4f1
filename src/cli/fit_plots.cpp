// The pictures of `kindred fit --plots`: ELDR's figures 1, 3, 4, 7, 8 and 9 for one's own model.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

#include "cli/fit.h"
#include "cli/plot.h"
#include "expert/domains.h"
#include "expert/pca.h"

namespace kindred::cli {
namespace {

// A palette has eight colours: the largest groups get their own, the rest share one.
constexpr size_t kMostGroups = 6;
// More points neither help the eye nor the browser; taken at even steps.
constexpr size_t kMostPoints = 2000;

// Labels come from files and may be of any length.
std::string short_label(const std::string& label) {
  constexpr size_t kMostBytes = 24;
  if (label.size() <= kMostBytes) return label;
  size_t end = kMostBytes;
  while (end > 0 && (static_cast<unsigned char>(label[end]) & 0xC0) == 0x80) --end;  // not within a character
  return label.substr(0, end) + "…";
}

class Plots {
 public:
  Plots(const FitArguments& options, FitResults& results) : options_(options), results_(results) {}

  Status write() {
    Status done = results_.fit ? pca() : Status();
    if (done.ok()) done = rho_by_layers();
    if (done.ok() && !results_.transforms.empty()) done = rho_by_transform();
    if (done.ok()) done = heat();
    if (done.ok() && results_.prediction) done = prediction();
    if (done.ok() && results_.prediction) done = batches();
    return done;
  }

 private:
  Status save(std::string name, std::string_view svg) {
    Status saved = save_svg(options_.plots, name, svg);
    if (saved.ok()) results_.plots.push_back(std::move(name));
    return saved;
  }

  std::string about() const {
    const expert::Activations& activations = results_.activations;
    return fmt::format("{} requests of {}", activations.requests(),
                       activations.model.empty() ? "an unnamed model" : activations.model);
  }

  // The domain of each clustered request, or its cohort where there are no labels.
  std::vector<std::string> group_names() const {
    std::vector<std::string> names;
    const auto& assignment = results_.fit->assignment;
    for (size_t i = 0; i < assignment.size(); ++i) {
      if (assignment[i] == expert::kNoCohort) continue;
      names.push_back(results_.activations.has_domains() ? results_.activations.domains[i]
                                                         : fmt::format("cohort {}", assignment[i]));
    }
    return names;
  }

  Status pca() {
    const expert::FitReport& report = *results_.fit;
    const expert::Points points{report.signatures, report.model.dims()};
    const expert::Pca pca = expert::principal_components(points);
    const std::vector<std::string> names = group_names();
    const std::vector<std::string> order = largest_first(names);
    Chart chart;
    chart.title = fmt::format("Signatures ({}) and cohort centroids, principal components",
                              to_string(report.model.data().transform));
    chart.x_label = fmt::format("first component ({:.0f}% of the variance)", 100 * pca.share[0]);
    chart.y_label = fmt::format("second component ({:.0f}%)", 100 * pca.share[1]);
    chart.note = about() + (options_.unbalanced ? "; k-means without balance" : "") +
                 ". A centroid has unit length, so it lies outside of a cohort whose requests differ.";
    for (const std::string& name : order)
      chart.series.push_back({.name = short_label(name), .x = {}, .y = {}, .line = false});
    const size_t step = points.size() / kMostPoints + 1;
    for (size_t i = 0; i < points.size(); i += step) {
      const size_t at = std::min<size_t>(
          static_cast<size_t>(std::find(order.begin(), order.end(), names[i]) - order.begin()), order.size() - 1);
      const auto [x, y] = pca.at(points.row(i));
      chart.series[at].x.push_back(x);
      chart.series[at].y.push_back(y);
    }
    Series centroids{.name = "centroids", .x = {}, .y = {}, .line = false};
    centroids.marker_px = 7;
    for (size_t k = 0; k < report.model.cohorts(); ++k) {
      const auto [x, y] = pca.at(report.model.centroid(k));
      centroids.x.push_back(x);
      centroids.y.push_back(y);
    }
    chart.series.push_back(std::move(centroids));
    return save("pca", line_chart(chart));
  }

  // At most kMostGroups names and, for the rest, "others".
  static std::vector<std::string> largest_first(const std::vector<std::string>& names) {
    std::map<std::string, size_t> counts;
    for (const std::string& name : names) ++counts[name];
    std::vector<std::string> order;
    for (const auto& [name, count] : counts) order.push_back(name);
    std::stable_sort(order.begin(), order.end(),
                     [&](const std::string& a, const std::string& b) { return counts[a] > counts[b]; });
    if (order.size() > kMostGroups) {
      order.resize(kMostGroups);
      order.push_back("others");
    }
    return order;
  }

  static Series rho_series(std::string name, const expert::LayerMask& mask) {
    Series series{
        .name = fmt::format("{} (peak {:.3f} at {})", name, mask.peak_rho(), mask.kept), .x = {}, .y = mask.rho};
    for (size_t s = 1; s <= mask.rho.size(); ++s) series.x.push_back(static_cast<double>(s));
    return series;
  }

  Status rho_by_layers() {
    Chart chart{.title = "Signature quality along the greedy order of layers",
                .x_label = "layers kept",
                .y_label = "rho with decode (Spearman)",
                .series = {}};
    chart.note = about();
    for (const auto& score : results_.transforms) {
      chart.series.push_back(rho_series(std::string(to_string(score.transform)), score.mask));
    }
    if (chart.series.empty() && results_.fit && !results_.fit->mask.order.empty()) {
      chart.series.push_back(
          rho_series(std::string(to_string(results_.fit->model.data().transform)), results_.fit->mask));
    }
    return chart.series.empty() ? Status() : save("rho_by_layers", line_chart(chart));
  }

  Status rho_by_transform() {
    BarChart chart{.title = "Signature quality by transform",
                   .y_label = "rho with decode (Spearman)",
                   .categories = {},
                   .groups = {"best layers", "all layers"},
                   .values = {{}, {}}};
    chart.note = about();
    for (const auto& score : results_.transforms) {
      chart.categories.emplace_back(to_string(score.transform));
      chart.values[0].push_back(score.mask.peak_rho());
      chart.values[1].push_back(score.mask.rho.back());
    }
    return save("rho_by_transform", bar_chart(chart));
  }

  Status heat() {
    Result<expert::DomainProfiles> profiles = expert::profile_domains(results_.activations);
    if (!profiles) return std::move(profiles).error();
    if (profiles->names.empty()) return {};  // nobody decoded anything
    const size_t layer = profiles->most_discriminative_layer();
    const expert::ExpertShape& shape = results_.activations.shape;
    HeatMap map;
    map.title = fmt::format("Expert use in {} by domain, layer {}", profiles->from_decode ? "decode" : "the prompt",
                            shape.layers[layer]);
    map.x_label = "experts, in blocks by the domain that uses them most";
    map.y_label = "domain";
    for (const std::string& name : profiles->names) map.rows.push_back(short_label(name));
    map.values = expert::domain_heat(*profiles, layer, shape.experts).excess;
    map.note = profiles->names.size() == 1
                   ? fmt::format("{}. A single domain: darker is above the mean of the experts.", about())
                   : fmt::format(
                         "{}. Darker is above the mean of the domains. The most discriminative layer: {:.0f}% of "
                         "the variance of its expert use lies between domains.",
                         about(), 100 * profiles->between_share[layer]);
    return save("domain_heat", heat_map(map));
  }

  Status prediction() {
    std::vector<const expert::DomainPrediction*> domains;
    for (const auto& domain : results_.prediction->domains) domains.push_back(&domain);
    std::stable_sort(domains.begin(), domains.end(), [](auto* a, auto* b) { return a->requests > b->requests; });
    const size_t left_out = domains.size() - std::min(domains.size(), kMostGroups);
    domains.resize(std::min(domains.size(), kMostGroups));
    Chart chart{.title = "Prefill predicts decode: a point is an expert of a layer",
                .x_label = "share of the layer's choices in prefill",
                .y_label = "share in decode",
                .series = {}};
    chart.note = fmt::format("{}; means of each domain, with their correlation. The line is equal use.{}", about(),
                             left_out > 0 ? fmt::format(" {} smaller domains are left out.", left_out) : "");
    double most = 0;
    for (const expert::DomainPrediction* domain : domains) {
      Series series{.name = fmt::format("{} ({:.2f})", short_label(domain->domain), domain->pooled_correlation),
                    .x = {},
                    .y = {},
                    .line = false};
      const size_t step = domain->prefill.size() * domains.size() / kMostPoints + 1;
      for (size_t c = 0; c < domain->prefill.size(); c += step) {
        series.x.push_back(domain->prefill[c]);
        series.y.push_back(domain->decode[c]);
        most = std::max(most, std::min(domain->prefill[c], domain->decode[c]));
      }
      chart.series.push_back(std::move(series));
    }
    chart.series.push_back({.name = "equal", .x = {0, most}, .y = {0, most}, .markers = false});
    return save("prefill_decode", line_chart(chart));
  }

  Status batches() {
    BarChart chart{.title = "Active experts per layer and decode step, by batch",
                   .y_label = "expected active experts",
                   .categories = {},
                   .groups = {"same domain", "mixed"},
                   .values = {{}, {}}};
    chart.note = about() + "; exact means over all batches of different requests";
    for (const expert::BatchComparison& row : results_.batches) {
      if (row.domains == 0) continue;
      chart.categories.push_back(fmt::format("batch {} ({:+.0f}%)", row.batch, -100 * row.saved()));
      chart.values[0].push_back(row.same_domain);
      chart.values[1].push_back(row.mixed);
    }
    return save("batches", bar_chart(chart));
  }

  const FitArguments& options_;
  FitResults& results_;
};

}  // namespace

Status write_fit_plots(const FitArguments& options, FitResults& results) { return Plots(options, results).write(); }

}  // namespace kindred::cli
