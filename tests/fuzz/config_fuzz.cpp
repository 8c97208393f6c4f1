// The configuration file: any text is read or refused with a reason.
#include <string>

#include "base/config.h"
#include "fuzz.h"

using namespace kindred;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::string text = "a", choice = "one";
  bool flag = false;
  int64_t number = 5;
  double real = 0.5;
  std::vector<std::string> list;
  ConfigSchema schema("fuzz", "A schema with one of each.");
  schema.text("text", &text, "any");
  schema.flag("flag", &flag, "yes or no");
  schema.integer("number", &number, 1, 10, "one to ten");
  schema.real("real", &real, 0, 1, "a share");
  schema.choice("choice", &choice, {"one", "two"}, "which");
  schema.list("list", &list, "some");
  const Status parsed = schema.parse_yaml({reinterpret_cast<const char*>(data), size}, "fuzz.yaml");
  KINDRED_CHECK(parsed.ok() || !parsed.error().message.empty());
  KINDRED_CHECK(number >= 1 && number <= 10 && real >= 0 && real <= 1 && (choice == "one" || choice == "two"));
  return 0;
}
