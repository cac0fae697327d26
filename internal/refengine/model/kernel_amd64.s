#include "textflag.h"

// Y0 to Y7 accumulate four rows of sixteen outputs. Multiplication and addition are separate on purpose: a fused one
// would round differently from the portable kernel.

// func runBlockAVX(c *block)
TEXT ·runBlockAVX(SB), NOSPLIT, $0-8
	MOVQ   c+0(FP), DI
	MOVQ   32(DI), R8
	MOVQ   40(DI), R9
	MOVQ   48(DI), R10
	MOVQ   56(DI), R11
	MOVQ   64(DI), SI
	MOVQ   72(DI), DX
	MOVQ   80(DI), CX
	VXORPS Y0, Y0, Y0
	VXORPS Y1, Y1, Y1
	VXORPS Y2, Y2, Y2
	VXORPS Y3, Y3, Y3
	VXORPS Y4, Y4, Y4
	VXORPS Y5, Y5, Y5
	VXORPS Y6, Y6, Y6
	VXORPS Y7, Y7, Y7
	XORQ   AX, AX

loop:
	CMPQ         AX, CX
	JGE          done
	VMOVUPS      (SI), Y8
	VMOVUPS      32(SI), Y9
	VBROADCASTSS (R8)(AX*4), Y10
	VMULPS       Y8, Y10, Y11
	VMULPS       Y9, Y10, Y12
	VADDPS       Y11, Y0, Y0
	VADDPS       Y12, Y1, Y1
	VBROADCASTSS (R9)(AX*4), Y10
	VMULPS       Y8, Y10, Y11
	VMULPS       Y9, Y10, Y12
	VADDPS       Y11, Y2, Y2
	VADDPS       Y12, Y3, Y3
	VBROADCASTSS (R10)(AX*4), Y10
	VMULPS       Y8, Y10, Y11
	VMULPS       Y9, Y10, Y12
	VADDPS       Y11, Y4, Y4
	VADDPS       Y12, Y5, Y5
	VBROADCASTSS (R11)(AX*4), Y10
	VMULPS       Y8, Y10, Y11
	VMULPS       Y9, Y10, Y12
	VADDPS       Y11, Y6, Y6
	VADDPS       Y12, Y7, Y7
	ADDQ         DX, SI
	INCQ         AX
	JMP          loop

done:
	MOVQ    0(DI), R8
	MOVQ    8(DI), R9
	MOVQ    16(DI), R10
	MOVQ    24(DI), R11
	VMOVUPS Y0, (R8)
	VMOVUPS Y1, 32(R8)
	VMOVUPS Y2, (R9)
	VMOVUPS Y3, 32(R9)
	VMOVUPS Y4, (R10)
	VMOVUPS Y5, 32(R10)
	VMOVUPS Y6, (R11)
	VMOVUPS Y7, 32(R11)
	VZEROUPPER
	RET
