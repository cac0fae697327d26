// SPDX-License-Identifier: Apache-2.0

package model

import (
	"math"
	"unsafe"
)

// lanes is the number of adjacent outputs that a kernel computes at once. Operands are laid out in panels of this
// width.
const lanes = 16

// operand is the right-hand side of a product, a linear map of depth inputs to outputs. The weight of output j and
// input k is data[j/lanes*panelStride + k*stride + j%lanes]. data is padded so that whole panels can be read.
type operand struct {
	data                []float32
	stride, panelStride int
}

// pack converts a row-major [rows][cols] matrix, with one row per output, to panels.
func pack(values []float32, rows, cols int) operand {
	panels := ceilDiv(rows, lanes)
	data := make([]float32, panels*cols*lanes)
	for row := range rows {
		panel := data[row/lanes*cols*lanes+row%lanes:]
		for k := range cols {
			panel[k*lanes] = values[row*cols+k]
		}
	}
	return operand{data, lanes, cols * lanes}
}

// from returns the part of the operand that starts at an output, which must be a multiple of lanes.
func (o operand) from(output int) operand {
	o.data = o.data[output/lanes*o.panelStride:]
	return o
}

// block holds the arguments of a kernel: dst[i][j] = sum over k of x[i][k] * b[k*stride+j], for four rows and all
// lanes. The assembly code depends on the offsets of the fields.
type block struct {
	dst, x [4]*float32
	b      *float32
	stride uintptr // in bytes
	depth  uintptr
}

// multiply computes dst[i*dstStride+j] = sum over k of x[i*xStride+k] * output j of input k of w, for i < rows,
// j < outputs, k < depth. Every sum runs over k in ascending order in one accumulator, and products are rounded before
// they are added, so that an element is bitwise equal in every block and with every kernel.
func multiply(dst []float32, dstStride int, x []float32, xStride, rows int, w operand, outputs, depth int) {
	var partial [4][lanes]float32
	for j := 0; j < outputs; j += lanes {
		b := w.data[j/lanes*w.panelStride:]
		_ = b[(depth-1)*w.stride+lanes-1] // the kernel has no bounds checks
		whole := j+lanes <= outputs
		for i := 0; i < rows; i += 4 {
			call := block{b: &b[0], stride: uintptr(w.stride) * 4, depth: uintptr(depth)}
			for r := range 4 {
				// Rows beyond the end repeat the last row.
				row := min(i+r, rows-1)
				call.x[r] = &x[row*xStride:][:depth][0]
				if whole {
					call.dst[r] = &dst[row*dstStride+j:][:lanes][0]
				} else {
					call.dst[r] = &partial[r][0]
				}
			}
			runBlock(&call)
			if !whole {
				for r := range min(4, rows-i) {
					copy(dst[(i+r)*dstStride+j:][:outputs-j], partial[r][:])
				}
			}
		}
	}
}

func runBlock(c *block) {
	if useAVX {
		runBlockAVX(c)
	} else {
		runBlockGeneric(c)
	}
}

// runBlockGeneric is the portable kernel. The conversions prevent the compiler from fusing a product with its addition.
func runBlockGeneric(c *block) {
	depth, stride := int(c.depth), int(c.stride/4)
	b := unsafe.Slice(c.b, (depth-1)*stride+lanes)
	for r := range c.x {
		x, dst := unsafe.Slice(c.x[r], depth), unsafe.Slice(c.dst[r], lanes)
		for j := 0; j < lanes; j += 4 {
			var s0, s1, s2, s3 float32
			for k, v := range x {
				w := (*[4]float32)(b[k*stride+j:])
				s0 += float32(v * w[0])
				s1 += float32(v * w[1])
				s2 += float32(v * w[2])
				s3 += float32(v * w[3])
			}
			dst[j], dst[j+1], dst[j+2], dst[j+3] = s0, s1, s2, s3
		}
	}
}

// rmsNorm writes x, scaled to unit root mean square and multiplied by weight, to dst. dst may be x.
func rmsNorm(dst, x, weight []float32, eps float32) {
	var squares float32
	for _, v := range x {
		squares += float32(v * v)
	}
	scale := 1 / float32(math.Sqrt(float64(squares/float32(len(x))+eps)))
	for i, v := range x {
		dst[i] = float32(v*scale) * weight[i]
	}
}

// softmax replaces scores by exp(score - max) and returns their sum. Callers divide by the sum if needed.
func softmax(scores []float32) (sum float32) {
	top := scores[0]
	for _, s := range scores {
		top = max(top, s)
	}
	for i, s := range scores {
		e := Exp(s - top)
		scores[i] = e
		sum += e
	}
	return sum
}

func silu(x float32) float32 { return x / (1 + Exp(-x)) }
