// A convolution as gemms. x is quantized once, into pixels of whole blocks. Strips of output pixels are multiplied with
// b, by a kernel that finds the pixels of each tap in a table; for other kernels, a strip gathers its taps to rows of
// A. The gemm stores its sums through a turn. So every instruction set has convolutions without a kernel of its own.
// Memory: 1.03 bytes for each value of the whole blocks of x, packed for VNNI 1.28, for AVX2 2.28; and a strip for each
// thread.
#include "conv.h"

#include <atomic>
#include <cstring>
#include <string>
#include <tuple>

#include "../error.h"
#include "arguments.h"
#include "constant_weight.h"
#include "quantize.h"
#include "tasks.h"

namespace mxfp8 {
namespace {

constexpr int64_t kStripBytes = 1 << 18;  // gathered bytes of a strip: they stay in L2 beside the panels of b
constexpr int64_t kLeastRows = 32;        // so that the panels of b are read for enough pixels
constexpr int kScaleOne = 127;            // the code of 2^0

// The sizes of a convolution in blocks.
struct Blocked {
  int64_t taps, channels, blocks, k;  // channels: of one group, in whole blocks; k: values of a row of A
  int64_t pixel_bytes, pixel_blocks;  // of one pixel of x, all groups
  explicit Blocked(const ConvArgs& args)
      : taps(args.axes[0].kernel * args.axes[1].kernel),
        channels(ceil_div(args.c / args.group, kBlock) * kBlock),
        blocks(channels / kBlock),
        k(taps * channels),
        pixel_bytes(args.group * channels),
        pixel_blocks(args.group * blocks) {}
};

// x as pixels [n, in..., channels], with their scales: elements, or blocks that the gemm `row` has packed. A pixel of
// zeros, the padding, is behind packed pixels.
struct Pixels {
  Scratch elements, scales;
  const GemmRow* row;
};

// Quantizes x in tiles of pack_columns. Calls done(elements, scales, pixel, width, block, blocks) with each: `width`
// pixels from `pixel` of all images on, and `blocks` blocks of their channels from `block` on.
template <class Done>
void quantize_tiles(const Kernels& kernels, const Parallel& parallel, const ConvArgs& args, const Done& done) {
  constexpr int64_t most = kPackDepth * kBlock;  // channels of a tile
  const int64_t pixels = args.axes[0].in * args.axes[1].in;
  const int64_t across = ceil_div(pixels, kColumnTile), down = ceil_div(args.c, most);
  const auto quantize = [&](int64_t tile) {
    const int64_t image = tile / (across * down), pixel = tile % across * kColumnTile;
    const int64_t channel = tile / across % down * most, channels = std::min(most, args.c - channel);
    alignas(64) uint8_t elements[kColumnTile * most], scales[kColumnTile * kPackDepth];
    const QuantizeArgs part = {.dtype = args.x_dtype,
                               .x = static_cast<const char*>(args.x) +
                                    ((image * args.c + channel) * pixels + pixel) * value_bytes(args.x_dtype),
                               .outer = std::min(kColumnTile, pixels - pixel),
                               .k = channels,
                               .inner = 1,
                               .stride = pixels,
                               .format = args.x_format,
                               .increment = args.increment,
                               .elements = elements,
                               .scales = scales,
                               .whole_tile = true};
    pack_columns_kernels[kernels.column](part, 0, 1, nullptr);
    done(elements, scales, image * pixels + pixel, part.outer, channel / kBlock, ceil_div(channels, kBlock));
  };
  for_equal_ranges(parallel, args.n * across * down, kColumnTile * std::min(args.c, most),
                   [&](int64_t, int64_t begin, int64_t end) {
                     for (int64_t tile = begin; tile < end; ++tile) quantize(tile);
                   });
}

Pixels quantize_pixels(const Kernels& kernels, const Parallel& parallel, const ConvArgs& args, const Blocked& sizes,
                       const GemmRow* row) {
  if (args.c == 0) return {};
  const int64_t all = args.n * args.axes[0].in * args.axes[1].in, stride = sizes.pixel_blocks;
  const int64_t block_bytes = row == nullptr ? kBlock : row->kernel->block_bytes;
  Pixels result = {scratch_of((all + 1) * stride * block_bytes), scratch_of((all + 1) * stride), row};
  auto* elements = static_cast<uint8_t*>(result.elements.get());
  auto* scales = static_cast<uint8_t*>(result.scales.get());
  std::atomic<bool> fits{true};
  quantize_tiles(
      kernels, parallel, args,
      [&](const uint8_t* codes, const uint8_t* of_codes, int64_t pixel, int64_t width, int64_t block, int64_t blocks) {
        for (int64_t i = 0; i < width; ++i) {
          const int64_t at = (pixel + i) * stride + block;
          std::memcpy(scales + at, of_codes + i * blocks, size_t(blocks));
          if (row != nullptr) continue;
          std::memcpy(elements + at * kBlock, codes + i * kPackDepth * kBlock, size_t(blocks * kBlock));
        }
        if (row == nullptr) return;
        const PixelBlocks tile = {codes, of_codes, width, blocks, kPackDepth * kBlock};
        void* first = elements + (pixel * stride + block) * block_bytes;
        if (!row->kernel->pack_pixels(tile, first, stride)) fits = false;
      });
  if (row == nullptr) return result;
  if (!fits) {  // gathered rows hold any scale; few inputs have such a block
    result = {};
    return quantize_pixels(kernels, parallel, args, sizes, nullptr);
  }
  const std::vector<uint8_t> zeros(size_t(stride * kBlock));
  std::memset(scales + all * stride, kScaleOne, size_t(stride));
  row->kernel->pack_pixels({zeros.data(), scales + all * stride, 1, stride, stride * kBlock},
                           elements + all * stride * block_bytes, stride);
  return result;
}

// Rows of A: the taps of some output pixels of one image, for one group.
struct Gathered {
  uint8_t* elements;  // [rows, k]
  uint8_t* scales;    // [rows, taps * blocks]
};

void gather(const ConvArgs& args, const Blocked& sizes, const Pixels& x, int64_t image, int64_t group, int64_t pixel,
            int64_t rows, const Gathered& to) {
  const ConvAxis &down = args.axes[0], &across = args.axes[1];
  const auto* elements = static_cast<const uint8_t*>(x.elements.get()) + group * sizes.channels;
  const auto* scales = static_cast<const uint8_t*>(x.scales.get()) + group * sizes.blocks;
  uint8_t *element = to.elements, *scale = to.scales;
  const bool adjacent = across.dilation == 1 && args.group == 1;  // the taps of a kernel row lie together in x
  for (int64_t row = pixel; row < pixel + rows; ++row) {
    const int64_t top = row / across.out * down.stride - down.pad, left = row % across.out * across.stride - across.pad;
    for (int64_t i = 0; i < down.kernel; ++i) {
      const int64_t y = top + i * down.dilation;
      const int64_t line = (image * down.in + y) * across.in;
      const bool outside = y < 0 || y >= down.in;
      int64_t taps = 1;  // padding, or pixels of x
      for (int64_t j = 0; j < across.kernel; j += taps) {
        const int64_t at = left + j * across.dilation;
        const bool padding = outside || at < 0 || at >= across.in;
        if (adjacent) {
          taps = across.kernel - j;
          if (!outside && at < across.in) taps = std::min(taps, at < 0 ? -at : across.in - at);
        }
        const auto bytes = size_t(taps * sizes.channels), blocks = size_t(taps * sizes.blocks);
        if (padding) {
          std::memset(element, 0, bytes);
          std::memset(scale, 0, blocks);
        } else {
          std::memcpy(element, elements + (line + at) * sizes.pixel_bytes, bytes);
          std::memcpy(scale, scales + (line + at) * sizes.pixel_blocks, blocks);
        }
        element += bytes;
        scale += blocks;
      }
    }
  }
}

// Sets for each tap and row the number of its pixel: [taps, rows].
void find_pixels(const ConvArgs& args, int64_t image, int64_t pixel, int64_t rows, uint32_t* numbers) {
  const ConvAxis &down = args.axes[0], &across = args.axes[1];
  const auto padding = uint32_t(args.n * down.in * across.in);
  for (int64_t tap = 0; tap < down.kernel * across.kernel; ++tap, numbers += rows) {
    const int64_t i = tap / across.kernel * down.dilation - down.pad;
    const int64_t j = tap % across.kernel * across.dilation - across.pad;
    int64_t count;  // rows that lie in one line of y
    for (int64_t row = 0; row < rows; row += count) {
      const int64_t y = (pixel + row) / across.out * down.stride + i, first = (pixel + row) % across.out;
      const int64_t line = (image * down.in + y) * across.in;
      count = std::min(rows - row, across.out - first);
      const int64_t x = first * across.stride + j;
      // The first row with a pixel in the line, and the row behind the last one.
      int64_t inside = x < 0 ? std::min(count, ceil_div(-x, across.stride)) : 0;
      int64_t last = x >= across.in ? 0 : std::min(count, ceil_div(across.in - x, across.stride));
      if (y < 0 || y >= down.in) inside = last = count;
      std::fill_n(numbers + row, inside, padding);
      auto number = uint32_t(line + x + inside * across.stride);
      for (int64_t n = inside; n < last; ++n, number += uint32_t(across.stride)) numbers[row + n] = number;
      std::fill(numbers + row + last, numbers + row + count, padding);
    }
  }
}

// Whether the pixels of x are rows of A as they lie, also without channels.
bool is_pointwise(const ConvArgs& args) {
  if (args.c == 0) return true;
  const auto plain = [](const ConvAxis& axis) { return axis.kernel == 1 && axis.stride == 1 && axis.in == axis.out; };
  return args.group == 1 && plain(args.axes[0]) && plain(args.axes[1]);
}

// The strips of a convolution, and the room that one needs.
class Strips {
 public:
  Strips(const Kernels& kernels, const Parallel& parallel, const ConvArgs& args, const Blocked& sizes, const Pixels& x)
      : args_(args), sizes_(sizes), x_(x), pointwise_(is_pointwise(args)), width_(args.o / args.group) {
    const int64_t pixels = conv_pixels(args);
    if (x.row != nullptr) tile_ = x.row->kernel->tile_rows;
    const int64_t gathered = kStripBytes / std::max<int64_t>(1, sizes.k) / kLeastRows * kLeastRows;
    const int64_t most =
        x.row != nullptr ? kGemmRows / tile_ * tile_ : std::max(kLeastRows, std::min(kGemmRows, gathered));
    // Strips of nearly equal size, of whole tiles, and as many for each thread. Gathered strips do not depend on the
    // number of threads: some of their gemms sum in an order that depends on the number of rows.
    across_ = ceil_div(pixels, most);
    const int64_t even = ceil_div(across_, parallel.threads) * parallel.threads;
    if (x.row != nullptr && count() % parallel.threads != 0 && pixels >= even * kLeastRows) across_ = even;
    row_bytes_ = x.row != nullptr ? sizes.taps * int64_t(sizeof(uint32_t))
                 : pointwise_     ? 0
                                  : sizes.k + sizes.taps * sizes.blocks;
    for (int64_t group = 0; group < args.group; ++group) {
      gemms_.push_back(gemm_of(group));
      if (args.weights == nullptr) continue;
      // Before the tasks: a gemm that makes panels runs tasks of its own.
      gemms_.back().panels = (*args.weights)[size_t(group)]->panels(kernels, parallel, gemms_.back());
    }
  }

  int64_t count() const { return args_.n * args_.group * across_; }

  // Computes strip `number`; its steps run in parallel.
  void run(const Kernels& kernels, const Parallel& parallel, int64_t number) const {
    const int64_t image = number / (args_.group * across_), group = number / across_ % args_.group;
    const int64_t pixel = first_pixel(number % across_), rows = first_pixel(number % across_ + 1) - pixel;
    const Scratch room = scratch_of(rows * row_bytes_);
    auto* elements = static_cast<uint8_t*>(room.get());
    const Gathered gathered = {elements, elements + rows * sizes_.k};
    GemmArgs g = gemms_[size_t(group)];
    const ConvPlace place = {args_, image, pixel, group * width_};
    g.m = rows, g.store = conv_store_kernels[kernels.column], g.to = &place;
    if (x_.row != nullptr) {
      auto* numbers = static_cast<uint32_t*>(room.get());
      find_pixels(args_, image, pixel, rows, numbers);
      const TapRows taps = {.pixels = numbers,
                            .blocks = sizes_.blocks,
                            .first = group * sizes_.blocks,
                            .stride = sizes_.pixel_blocks,
                            .scales = static_cast<const uint8_t*>(x_.scales.get()),
                            .packed = x_.elements.get(),
                            .unpack = x_.row->kernel->unpack_block};
      g.taps = &taps;
      return multiply_pixels(kernels, parallel, *x_.row, g);
    }
    if (pointwise_) {
      const int64_t first = image * conv_pixels(args_) + pixel;
      g.a = static_cast<const uint8_t*>(x_.elements.get()) + first * sizes_.k;
      g.a_scales = static_cast<const uint8_t*>(x_.scales.get()) + first * sizes_.blocks;
    } else {
      for_equal_ranges(parallel, rows, sizes_.k, [&](int64_t, int64_t begin, int64_t end) {
        gather(args_, sizes_, x_, image, group, pixel + begin, end - begin,
               {gathered.elements + begin * sizes_.k, gathered.scales + begin * sizes_.taps * sizes_.blocks});
      });
      g.a = gathered.elements, g.a_scales = gathered.scales;
    }
    gemm(kernels, parallel, g);
  }

 private:
  // The first pixel of strip `number` of an image.
  int64_t first_pixel(int64_t number) const {
    const int64_t pixels = conv_pixels(args_);
    return std::min(pixels, ceil_div(pixels, tile_) * number / across_ * tile_);
  }
  GemmArgs gemm_of(int64_t group) const {
    const uint8_t* b = args_.rows != nullptr ? args_.rows : args_.b;
    return {.a_format = args_.x_format,
            .a_scales = b,  // not null: A is quantized
            .a_stride = sizes_.k,
            .b_format = args_.b_format,
            .b = b + group * width_ * sizes_.k,
            .b_scales = args_.b_scales + group * width_ * sizes_.taps * sizes_.blocks,
            .m = std::max<int64_t>(1, conv_pixels(args_) / across_),
            .n = width_,
            .k = sizes_.k,
            .block_values = std::min(args_.c / args_.group, kBlock)};
  }

  const ConvArgs& args_;
  const Blocked& sizes_;
  const Pixels& x_;
  const bool pointwise_;
  const int64_t width_;  // output channels of a group
  int64_t tile_ = 1, across_, row_bytes_;
  std::vector<GemmArgs> gemms_;  // of each group
};

// Throws Error unless the axis has an output.
ConvAxis checked_axis(const mxfp8_conv_axis& axis) {
  constexpr int64_t most = INT32_MAX;  // so that no sum of these sizes overflows
  check_range({"in", axis.in}, 0, most);
  check_range({"kernel", axis.kernel}, 1, most);
  check_range({"stride", axis.stride}, 1, most);
  check_range({"dilation", axis.dilation}, 1, most);
  check_range({"pad_begin", axis.pad_begin}, 0, most);
  check_range({"pad_end", axis.pad_end}, 0, most);
  const int64_t reach = axis.dilation * (axis.kernel - 1) + 1;
  check_range({"padded in", axis.in + axis.pad_begin + axis.pad_end}, reach, INT64_MAX);
  const int64_t out = (axis.in + axis.pad_begin + axis.pad_end - reach) / axis.stride + 1;
  return {axis.in, out, axis.kernel, axis.stride, axis.dilation, axis.pad_begin};
}

// Throws Error unless each group has whole blocks and as many outputs as the others.
void check_groups(const ConvArgs& args) {
  const int64_t channels = args.c / args.group;
  if (args.c % args.group == 0 && args.o % args.group == 0 && (args.group == 1 || channels % kBlock == 0)) return;
  throw Error(MXFP8_BAD_ARGUMENT,
              "group is " + std::to_string(args.group) + ", c is " + std::to_string(args.c) + ", o is " +
                  std::to_string(args.o),
              "groups of equal size, with a multiple of 32 channels", "convolve in float32");
}

}  // namespace

std::vector<uint8_t> conv_rows(const ConvArgs& args) {
  const Blocked sizes(args);
  const int64_t channels = args.c / args.group;
  if (channels == sizes.channels) return {};
  std::vector<uint8_t> rows(size_t(args.o * sizes.k));
  for (int64_t tap = 0; tap < args.o * sizes.taps; ++tap) {
    std::memcpy(rows.data() + tap * sizes.channels, args.b + tap * channels, size_t(channels));
  }
  return rows;
}

const ConvWeight* ConstantWeight::parts(const ConvArgs& args) {
  const std::lock_guard<std::mutex> lock(making_);
  if (parts_ == nullptr) {
    auto parts = std::make_shared<ConvWeight>(ConvWeight{args, conv_rows(args), {}});
    for (int64_t i = 0; i < args.group; ++i) parts->groups.push_back(std::make_shared<ConstantWeight>());
    parts_ = std::move(parts);
  }
  const auto sizes = [](const ConvArgs& a) {
    return std::make_tuple(a.b, a.b_scales, a.b_format, a.o, a.c, a.group, a.axes[0].kernel * a.axes[1].kernel);
  };
  return sizes(args) == sizes(parts_->first) ? parts_.get() : nullptr;
}

void conv(const Kernels& kernels, const Parallel& parallel, const ConvArgs& whole) {
  if (whole.n * whole.o * conv_pixels(whole) == 0) return;
  ConvArgs args = whole;
  std::vector<uint8_t> rows;
  if (args.rows == nullptr) {
    rows = conv_rows(args);
    if (!rows.empty()) args.rows = rows.data();
  }
  const Blocked sizes(args);
  // A pointwise convolution gathers nothing. The number of a pixel, and of the padding, has 32 bits.
  const bool taps = !is_pointwise(args) && args.n * args.axes[0].in * args.axes[1].in < UINT32_MAX;
  const GemmArgs formats = {.a_format = args.x_format, .a_scales = args.b_scales, .b_format = args.b_format};
  const GemmRow* row = taps ? gemm_of_pixels(kernels, formats) : nullptr;
  const Pixels x = quantize_pixels(kernels, parallel, args, sizes, row);
  const Strips strips(kernels, parallel, args, sizes, x);
  // With a strip for each thread, no thread waits for another; with fewer, the threads share each strip.
  if (strips.count() >= parallel.threads) {
    const Parallel alone{nullptr, nullptr, 1};
    parallel_for(parallel, strips.count(), [&](int64_t strip) { strips.run(kernels, alone, strip); });
  } else {
    for (int64_t strip = 0; strip < strips.count(); ++strip) strips.run(kernels, parallel, strip);
  }
}

}  // namespace mxfp8

using namespace mxfp8;

extern "C" {

int mxfp8_conv(int x_dtype, const void* x, int64_t n, int64_t c, int64_t o, int64_t group, const mxfp8_conv_axis* axes,
               int x_format, int scale_rounding, int b_format, const uint8_t* b, const uint8_t* b_scales,
               const float* bias, int residual_dtype, const void* residual, int residual_after, int epilogue,
               float alpha, float beta, int y_dtype, void* y, int64_t weight, int threads) {
  return computed([&] {
    check_value_dtype("x_dtype", x_dtype);
    check_element_format("x_format", x_format);
    check_rounding("scale_rounding", scale_rounding);
    check_element_format("b_format", b_format);
    check_value_dtype("residual_dtype", residual_dtype);
    check_value_dtype("y_dtype", y_dtype);
    check_range({"epilogue", epilogue}, MXFP8_NONE, MXFP8_HARD_SWISH);
    check_sizes({{"n", n}, {"c", c}, {"o", o}});
    check_range({"group", group}, 1, INT64_MAX);
    check_array(array("axes", axes, alignof(mxfp8_conv_axis)), {2 * sizeof *axes / alignof(mxfp8_conv_axis)});
    const Parallel parallel = checked_threads(threads);
    const std::shared_ptr<ConstantWeight> constant = numbered_weight(weight);  // lives until this call ends
    ConvArgs args = {.x_dtype = x_dtype,
                     .x = x,
                     .n = n,
                     .c = c,
                     .o = o,
                     .group = group,
                     .x_format = x_format,
                     .increment = scale_increment(x_format, scale_rounding),
                     .b_format = b_format,
                     .b = b,
                     .b_scales = b_scales,
                     .bias = bias,
                     .residual_dtype = residual_dtype,
                     .residual = residual,
                     .residual_after = residual_after != 0,
                     .epilogue = epilogue,
                     .alpha = alpha,
                     .beta = beta,
                     .y_dtype = y_dtype,
                     .y = y};
    for (int i = 0; i < 2; ++i) args.axes[i] = checked_axis(axes[i]);
    check_groups(args);
    const ConvAxis &down = args.axes[0], &across = args.axes[1];
    check_array(array("x", x, value_bytes(x_dtype)), {n, c, down.in, across.in});
    check_array(array("b", b, 1), {o, down.kernel, across.kernel, c / group});
    check_array(array("b_scales", b_scales, 1), {o, down.kernel, across.kernel, scale_count(c / group)});
    if (bias != nullptr) check_array(array("bias", bias, sizeof(float)), {o});
    if (residual != nullptr) {
      check_array(array("residual", residual, value_bytes(residual_dtype)), {n, o, down.out, across.out});
    }
    check_array(array("y", y, value_bytes(y_dtype)), {n, o, down.out, across.out});
    if (const ConvWeight* own = constant == nullptr ? nullptr : constant->parts(args)) {
      args.weights = &own->groups;
      if (!own->rows.empty()) args.rows = own->rows.data();
    }
    conv(kernels_in_use(), parallel, args);
  });
}

}  // extern "C"
