// Test only: a certificate authority in a folder of its own.
#pragma once

#include <memory>
#include <string>

namespace kindred::net::testing {

struct CertificateFiles {
  std::string certificate, key;  // paths, PEM
};

class TestAuthority {
 public:
  // Writes into ::testing::TempDir(). Two of them do not trust each other.
  TestAuthority();
  ~TestAuthority();
  TestAuthority(const TestAuthority&) = delete;
  TestAuthority& operator=(const TestAuthority&) = delete;

  std::string ca() const;  // path
  // For `names`, as in "DNS:localhost,IP:127.0.0.1", and any use. `name` tells files apart.
  CertificateFiles issue(const std::string& name, const std::string& names = "DNS:localhost,IP:127.0.0.1");

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace kindred::net::testing
