package engine_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/semmoe/operator/internal/engine"
	"github.com/semmoe/operator/internal/engine/registry"
)

func TestSGLangArgs(t *testing.T) {
	launch := engine.Launch{ModelPath: "/models/m", ServedModelName: "m", Host: "$(POD_IP)", Port: 30000, Ranks: 4, AttentionDP: true}
	routed := launch
	routed.RoutedExperts = true
	tensorParallel := launch
	tensorParallel.AttentionDP = false
	common := []string{"--model-path", "/models/m", "--served-model-name", "m", "--host", "$(POD_IP)", "--port", "30000", "--tp-size", "4", "--ep-size", "4"}

	cases := map[string]struct {
		launch  engine.Launch
		user    []string
		want    []string
		wantErr string
	}{
		"attention data parallel": {
			launch: launch,
			user:   []string{"--mem-fraction-static", "0.8"},
			want:   append(append([]string{}, common...), "--dp-size", "4", "--enable-dp-attention", "--mem-fraction-static", "0.8"),
		},
		"attention tensor parallel":          {launch: tensorParallel, want: common},
		"a flag of ours":                     {launch: launch, user: []string{"--port", "1"}, wantErr: `"--port" contradicts spec.engine.port`},
		"a flag of ours with a value":        {launch: launch, user: []string{"--ep-size=8"}, wantErr: `"--ep-size=8" contradicts spec.parallelism.expertParallelSize`},
		"another spelling":                   {launch: launch, user: []string{"--tp", "8"}, wantErr: `"--tp" contradicts spec.parallelism.expertParallelSize`},
		"routed experts":                     {launch: routed, want: append(append([]string{}, common...), "--dp-size", "4", "--enable-dp-attention", "--enable-return-routed-experts")},
		"a flag that contradicts the absent": {launch: tensorParallel, user: []string{"--enable-dp-attention"}, wantErr: "contradicts spec.parallelism.attention"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			adapter, err := registry.For("SGLang")
			if err != nil {
				t.Fatal(err)
			}
			got, err := adapter.Args(tc.launch, tc.user)
			if tc.wantErr != "" {
				if err == nil || !strings.Contains(err.Error(), tc.wantErr) {
					t.Fatalf("error %v, want one that contains %q", err, tc.wantErr)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("args (-want +got):\n%s", diff)
			}
		})
	}
}

func TestUnknownEngine(t *testing.T) {
	if _, err := registry.For("Other"); err == nil || !strings.Contains(err.Error(), `"Other" is not known: use SGLang`) {
		t.Errorf("error %v does not name the value and what is allowed", err)
	}
}

func TestRoutedExperts(t *testing.T) {
	adapter, err := registry.For("SGLang")
	if err != nil {
		t.Fatal(err)
	}
	decode := adapter.RoutedExperts.Decode
	const text = "AQAAAAIAAAADAAAA//8AAA=="
	got, err := decode(text, 2, 1)
	if diff := cmp.Diff([]int32{1, 2, 3, 0xffff}, got); diff != "" || err != nil {
		t.Errorf("error %v, (-want +got):\n%s", err, diff)
	}
	if again := adapter.RoutedExperts.Encode(got, 2, 1); again != text {
		t.Errorf("encoded again they are %q, want %q", again, text)
	}
	for name, text := range map[string]string{"not base64": "!", "half a token": "AQAAAA==", "no whole number": "AQA="} {
		if _, err := decode(text, 2, 1); err == nil || !strings.Contains(err.Error(), "routed experts") {
			t.Errorf("%s: error %v", name, err)
		}
	}
}
