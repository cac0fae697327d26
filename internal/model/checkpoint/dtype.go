// SPDX-License-Identifier: Apache-2.0

package checkpoint

import (
	"encoding/binary"
	"math"
)

// DType is an element type, named as in safetensors.
type DType string

// The element types that can be converted to float32.
const (
	BF16 DType = "BF16"
	F16  DType = "F16"
	F32  DType = "F32"
)

// dtypeBits is the size of an element in bits. Elements of the four-bit and six-bit types are packed without padding.
var dtypeBits = map[DType]int64{
	"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
	"U16": 16, "I16": 16, F16: 16, BF16: 16,
	"U32": 32, "I32": 32, F32: 32,
	"U64": 64, "I64": 64, "F64": 64, "C64": 64,
	"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}

// DecodeFloat32 converts little-endian elements of type BF16, F16 or F32 to float32. The conversion is exact.
func DecodeFloat32(dst []float32, src []byte, dtype DType) {
	switch dtype {
	case BF16:
		for i := range dst {
			dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(src[2*i:])) << 16)
		}
	case F16:
		for i := range dst {
			dst[i] = float16(binary.LittleEndian.Uint16(src[2*i:]))
		}
	case F32:
		for i := range dst {
			dst[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
		}
	}
}

// float16 converts an IEEE 754 binary16 value to float32.
func float16(bits uint16) float32 {
	sign := uint32(bits>>15) << 31
	exponent := uint32(bits>>10) & 0x1f
	fraction := uint32(bits) & 0x3ff
	switch exponent {
	case 0: // zero or subnormal: fraction times 2^-24, exact in float32
		magnitude := float32(fraction) * (1.0 / (1 << 24))
		return math.Float32frombits(math.Float32bits(magnitude) | sign)
	case 0x1f: // infinity or NaN
		return math.Float32frombits(sign | 0xff<<23 | fraction<<13)
	default:
		return math.Float32frombits(sign | (exponent+127-15)<<23 | fraction<<13)
	}
}
