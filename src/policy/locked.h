// Policies behind a lock, for routers with several threads: what a policy remembers (cursors, rings, generators) is
// one for all of them, so that they take turns as one router does.
//
// Thread-safety: any thread. choose() holds the lock, so no two decisions of one policy run at a time; name() and
// the wants_…() of a policy do not change and take none.
#pragma once

#include <memory>
#include <mutex>
#include <utility>

#include "policy/decode_policy.h"
#include "policy/engine_policy.h"
#include "policy/prefill_policy.h"

namespace kindred::policy {

class LockedPrefill final : public PrefillPolicy {
 public:
  explicit LockedPrefill(std::unique_ptr<PrefillPolicy> policy) : policy_(std::move(policy)) {}

  std::optional<Decision> choose(const PrefillSnapshot& snapshot, const PrefillRequest& request) override {
    const std::lock_guard lock(mutex_);
    return policy_->choose(snapshot, request);
  }
  std::string_view name() const override { return policy_->name(); }
  bool wants_prefix() const override { return policy_->wants_prefix(); }

 private:
  std::mutex mutex_;
  const std::unique_ptr<PrefillPolicy> policy_;
};

class LockedDecode final : public DecodePolicy {
 public:
  explicit LockedDecode(std::unique_ptr<DecodePolicy> policy) : policy_(std::move(policy)) {}

  std::optional<Decision> choose(const DecodeSnapshot& snapshot, const DecodeRequest& request) override {
    const std::lock_guard lock(mutex_);
    return policy_->choose(snapshot, request);
  }
  std::string_view name() const override { return policy_->name(); }
  bool wants_counts() const override { return policy_->wants_counts(); }
  bool wants_expert_load() const override { return policy_->wants_expert_load(); }

 private:
  std::mutex mutex_;
  const std::unique_ptr<DecodePolicy> policy_;
};

class LockedEngine final : public EnginePolicy {
 public:
  explicit LockedEngine(std::unique_ptr<EnginePolicy> policy) : policy_(std::move(policy)) {}

  std::optional<Decision> choose(std::span<const EngineView> engines, const EngineRequest& request) override {
    const std::lock_guard lock(mutex_);
    return policy_->choose(engines, request);
  }
  std::string_view name() const override { return policy_->name(); }

 private:
  std::mutex mutex_;
  const std::unique_ptr<EnginePolicy> policy_;
};

}  // namespace kindred::policy
