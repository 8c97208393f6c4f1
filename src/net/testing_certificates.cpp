#include "net/testing_certificates.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>

#include "base/result.h"

namespace kindred::net::testing {
namespace {

struct Free {
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(FILE* file) const { std::fclose(file); }
};
using Key = std::unique_ptr<EVP_PKEY, Free>;
using Certificate = std::unique_ptr<X509, Free>;

void extend(X509* certificate, X509* issuer, int nid, const char* value) {
  X509V3_CTX context;
  X509V3_set_ctx_nodb(&context);
  X509V3_set_ctx(&context, issuer, certificate, nullptr, nullptr, 0);
  X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, nid, value);
  KINDRED_CHECK(extension != nullptr);
  X509_add_ext(certificate, extension, -1);
  X509_EXTENSION_free(extension);
}

Certificate blank(EVP_PKEY* key, long serial, const char* common_name) {
  Certificate certificate(X509_new());
  X509_set_version(certificate.get(), 2);
  ASN1_INTEGER_set(X509_get_serialNumber(certificate.get()), serial);
  X509_gmtime_adj(X509_getm_notBefore(certificate.get()), -3600);
  X509_gmtime_adj(X509_getm_notAfter(certificate.get()), 24 * 3600);
  X509_set_pubkey(certificate.get(), key);
  X509_NAME_add_entry_by_txt(X509_get_subject_name(certificate.get()), "CN", MBSTRING_ASC,
                             reinterpret_cast<const unsigned char*>(common_name), -1, -1, 0);
  return certificate;
}

void save(const std::string& path, X509* certificate, EVP_PKEY* key) {
  const std::unique_ptr<FILE, Free> file(std::fopen(path.c_str(), "w"));
  KINDRED_CHECK(file != nullptr);
  if (certificate != nullptr) PEM_write_X509(file.get(), certificate);
  if (key != nullptr) PEM_write_PrivateKey(file.get(), key, nullptr, nullptr, 0, nullptr, nullptr);
}

}  // namespace

struct TestAuthority::Impl {
  std::string folder;
  Key key{EVP_EC_gen("P-256")};
  Certificate certificate;
  long serial = 1;
};

TestAuthority::TestAuthority() : impl_(std::make_unique<Impl>()) {
  std::string pattern = std::filesystem::temp_directory_path() / "kindred_tls_XXXXXX";
  KINDRED_CHECK(::mkdtemp(pattern.data()) != nullptr);
  impl_->folder = pattern;
  impl_->certificate = blank(impl_->key.get(), impl_->serial, "kindred test authority");
  X509* ca = impl_->certificate.get();
  X509_set_issuer_name(ca, X509_get_subject_name(ca));
  extend(ca, ca, NID_basic_constraints, "critical,CA:TRUE");
  extend(ca, ca, NID_key_usage, "critical,keyCertSign,cRLSign");
  extend(ca, ca, NID_subject_key_identifier, "hash");
  X509_sign(ca, impl_->key.get(), EVP_sha256());
  save(this->ca(), ca, nullptr);
}

TestAuthority::~TestAuthority() {
  std::error_code ignored;
  std::filesystem::remove_all(impl_->folder, ignored);
}

std::string TestAuthority::ca() const { return impl_->folder + "/ca.pem"; }

CertificateFiles TestAuthority::issue(const std::string& name, const std::string& names) {
  const Key key(EVP_EC_gen("P-256"));
  const Certificate certificate = blank(key.get(), ++impl_->serial, name.c_str());
  X509* ca = impl_->certificate.get();
  X509_set_issuer_name(certificate.get(), X509_get_subject_name(ca));
  extend(certificate.get(), ca, NID_subject_alt_name, names.c_str());
  extend(certificate.get(), ca, NID_authority_key_identifier, "keyid");
  X509_sign(certificate.get(), impl_->key.get(), EVP_sha256());
  CertificateFiles files{impl_->folder + "/" + name + ".pem", impl_->folder + "/" + name + ".key"};
  save(files.certificate, certificate.get(), nullptr);
  save(files.key, nullptr, key.get());
  return files;
}

}  // namespace kindred::net::testing
