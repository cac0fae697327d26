package cost_test

import (
	"math"
	"testing"

	"github.com/semmoe/operator/solver/cost"
	"github.com/semmoe/operator/solver/trace"
)

// TestProductsAreAsMeasured compares with grouped gate and up projections measured on one H200, in microseconds.
func TestProductsAreAsMeasured(t *testing.T) {
	for _, m := range []struct {
		hidden, inter, experts, tokens int
		us                             float64
	}{
		{2048, 768, 16, 1, 66.6}, {2048, 768, 16, 128, 62.0}, {2048, 768, 16, 512, 106.8}, {2048, 768, 16, 4096, 625.5},
		{2048, 1408, 8, 8, 64.2}, {2048, 1408, 8, 1024, 180.6}, {2048, 1408, 8, 3072, 406.8},
		{5120, 1536, 20, 32, 238.3}, {5120, 1536, 20, 512, 500.5}, {5120, 1536, 20, 4096, 3881.5},
		{7168, 2048, 32, 8, 647.5}, {7168, 2048, 32, 128, 562.0}, {7168, 2048, 32, 512, 1374.6}, {7168, 2048, 32, 2048, 5834.1},
	} {
		expert := 2 * float64(m.hidden*m.inter)
		got := cost.H200.Products(float64(m.experts)*expert, float64(m.experts*m.tokens)*expert)
		if math.Abs(got/m.us-1) > 0.16 {
			t.Errorf("%+v: modelled %.1f", m, got)
		}
	}
}

func TestLayerTime(t *testing.T) {
	model := trace.Model{TopK: 8, HiddenSize: 2048, Config: `{"moe_intermediate_size":768}`}
	l := cost.LayerOf(&model, cost.NVLinkH200, 8, 16)
	if l.ExpertSize != 768 || l.SlotsPerRank != 16 {
		t.Fatalf("%+v", l)
	}
	// 8,192 tokens of a rank at a local rate of .6 took 451 µs one way.
	if got := l.Time(8*8192, .4, 1).Exchange / 2; math.Abs(got/451-1) > 0.1 {
		t.Errorf("an exchange takes %.0f µs", got)
	}
	local := l.LocalTime(4096)
	for _, slower := range []cost.LayerTime{l.Time(4096, .5, 1), l.Time(4096, 0, 1.5), l.Time(8192, 0, 1)} {
		if slower.Total() <= local.Total() {
			t.Errorf("%+v is faster than %+v", slower, local)
		}
	}
	report := cost.Report{MaxSend: .3, MaxRecv: .6, ExpertWindowImbalance: 1.2}
	if got := l.TimeOf(4096, &report); got != l.Time(4096, .6, 1.2) {
		t.Errorf("%+v: the busier of sending and receiving counts", got)
	}
	unknown := cost.LayerOf(&trace.Model{TopK: 8}, cost.NVLinkH200, 8, 16)
	if unknown.HiddenSize != 4096 || unknown.ExpertSize != 1536 {
		t.Errorf("%+v", unknown)
	}
	if dense := cost.LayerOf(&trace.Model{HiddenSize: 10, Config: `{"intermediate_size":20}`}, cost.NVLinkH200, 8, 16); dense.ExpertSize != 20 {
		t.Errorf("%+v", dense)
	}
}
