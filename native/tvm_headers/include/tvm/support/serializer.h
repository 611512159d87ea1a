// How values lie in a library: numbers, enumerations and plain structs as their bytes, low end
// first; containers as the number of elements (uint64), then the elements; a map's element is its
// key, then its value. The compiler on the host writes, this reads.
#ifndef TVM_SUPPORT_SERIALIZER_H_
#define TVM_SUPPORT_SERIALIZER_H_

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/endian.h>
#include <tvm/ffi/string.h>
#include <tvm/support/io.h>

#include <cstdint>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace tvm {
namespace support {

template <typename T, typename Enable>
struct Serializer {
  static_assert(std::is_trivially_copyable_v<T> && !std::is_pointer_v<T>,
                "this type needs a Serializer of its own");
  static_assert(TVM_FFI_IO_NO_ENDIAN_SWAP, "the bytes of numbers are not swapped here");

  static void Write(Stream* stream, const T& value) {
    stream->Write(static_cast<const void*>(&value), sizeof(T));
  }

  static bool Read(Stream* stream, T* value) {
    return stream->Read(static_cast<void*>(value), sizeof(T)) == sizeof(T);
  }
};

template <typename Sequence, typename Element>
struct SequenceSerializer {
  static void Write(Stream* stream, const Sequence& sequence) {
    stream->Write(static_cast<uint64_t>(sequence.size()));
    for (const auto& element : sequence) Serializer<Element>::Write(stream, element);
  }

  static bool Read(Stream* stream, Sequence* sequence) {
    uint64_t count;
    if (!stream->Read(&count)) return false;
    Sequence result;
    // Grows element by element: a wrong count ends with the stream, not with the memory.
    for (uint64_t i = 0; i < count; ++i) {
      Element element;
      if (!Serializer<Element>::Read(stream, &element)) return false;
      result.push_back(std::move(element));
    }
    *sequence = std::move(result);
    return true;
  }
};

template <typename T>
struct Serializer<std::vector<T>> : SequenceSerializer<std::vector<T>, T> {};

template <typename T>
struct Serializer<ffi::Array<T>> : SequenceSerializer<ffi::Array<T>, T> {};

template <>
struct Serializer<std::string> : SequenceSerializer<std::string, char> {};

template <>
struct Serializer<ffi::String> {
  static void Write(Stream* stream, const ffi::String& text) { stream->Write(std::string(text)); }

  static bool Read(Stream* stream, ffi::String* text) {
    std::string read;
    if (!stream->Read(&read)) return false;
    *text = ffi::String(std::move(read));
    return true;
  }
};

template <typename Map, typename Key, typename Value>
struct MapSerializer {
  static void Write(Stream* stream, const Map& map) {
    stream->Write(static_cast<uint64_t>(map.size()));
    for (const auto& item : map) {
      Serializer<Key>::Write(stream, item.first);
      Serializer<Value>::Write(stream, item.second);
    }
  }

  static bool Read(Stream* stream, Map* map) {
    uint64_t count;
    if (!stream->Read(&count)) return false;
    Map result;
    for (uint64_t i = 0; i < count; ++i) {
      Key key;
      Value value;
      if (!Serializer<Key>::Read(stream, &key)) return false;
      if (!Serializer<Value>::Read(stream, &value)) return false;
      Insert(&result, std::move(key), std::move(value));
    }
    *map = std::move(result);
    return true;
  }

 private:
  template <typename K, typename V>
  static void Insert(std::unordered_map<K, V>* map, K key, V value) {
    map->emplace(std::move(key), std::move(value));
  }

  template <typename K, typename V>
  static void Insert(ffi::Map<K, V>* map, K key, V value) {
    map->Set(std::move(key), std::move(value));
  }
};

template <typename Key, typename Value>
struct Serializer<std::unordered_map<Key, Value>>
    : MapSerializer<std::unordered_map<Key, Value>, Key, Value> {};

template <typename Key, typename Value>
struct Serializer<ffi::Map<Key, Value>> : MapSerializer<ffi::Map<Key, Value>, Key, Value> {};

}  // namespace support
}  // namespace tvm

#endif  // TVM_SUPPORT_SERIALIZER_H_
