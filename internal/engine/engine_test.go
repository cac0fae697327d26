// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

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
		"attention tensor parallel":     {launch: tensorParallel, want: common},
		"an operator flag":              {launch: launch, user: []string{"--port", "1"}, wantErr: `"--port" contradicts spec.engine.port`},
		"an operator flag with a value": {launch: launch, user: []string{"--ep-size=8"}, wantErr: `"--ep-size=8" contradicts spec.parallelism.expertParallelSize`},
		"another spelling":              {launch: launch, user: []string{"--tp", "8"}, wantErr: `"--tp" contradicts spec.parallelism.expertParallelSize`},
		"routed experts":                {launch: routed, want: append(append([]string{}, common...), "--dp-size", "4", "--enable-dp-attention", "--enable-return-routed-experts")},
		"a flag that is absent":         {launch: tensorParallel, user: []string{"--enable-dp-attention"}, wantErr: "contradicts spec.parallelism.attention"},
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

// TestTLSFlags checks the flags for TLS, and that a user's flags contradict them.
func TestTLSFlags(t *testing.T) {
	launch := engine.Launch{ModelPath: "/models/m", ServedModelName: "m", Host: "h", Port: 1, Ranks: 4, AttentionDP: true}
	secured := launch
	secured.CertFile, secured.KeyFile = "/tls/tls.crt", "/tls/tls.key"
	const flags = "--ssl-certfile /tls/tls.crt --ssl-keyfile /tls/tls.key"
	for _, engineType := range []string{"SGLang", "VLLM", "VLLMAscend"} {
		adapter, err := registry.For(engineType)
		if err != nil {
			t.Fatal(err)
		}
		for _, tc := range []struct {
			launch  engine.Launch
			user    string
			serves  bool
			wantErr bool
		}{{launch, "", false, false}, {launch, "--ssl-certfile=/own", false, false}, {secured, "", true, false}, {secured, "--ssl-certfile=/own", false, true}, {secured, "--ssl_keyfile /own", false, true}} {
			args, err := adapter.Args(tc.launch, strings.Fields(tc.user))
			if (err != nil) != tc.wantErr || tc.wantErr && !strings.Contains(err.Error(), "contradicts spec.engine.tls") {
				t.Errorf("%s with %q: error %v", engineType, tc.user, err)
			}
			if got := strings.Contains(strings.Join(args, " "), flags); got != tc.serves {
				t.Errorf("%s with %q: arguments %v, want TLS %t", engineType, tc.user, args, tc.serves)
			}
		}
	}
}

// TestKVEventsFlag checks the flag for KV events, and that users may set it only where the operator does not.
func TestKVEventsFlag(t *testing.T) {
	for engineType, want := range map[string]string{
		"SGLang":     `--kv-events-config {"endpoint":"tcp://*:5557","publisher":"zmq","replay_endpoint":"tcp://*:5561"}`,
		"VLLM":       `--kv-events-config {"enable_kv_cache_events":true,"endpoint":"tcp://*:5557","publisher":"zmq","replay_endpoint":"tcp://*:5561"}`,
		"VLLMAscend": `--kv-events-config {"enable_kv_cache_events":true,"endpoint":"tcp://*:5557","publisher":"zmq","replay_endpoint":"tcp://*:5561"}`,
	} {
		adapter, err := registry.For(engineType)
		if err != nil {
			t.Fatal(err)
		}
		launch := engine.Launch{ModelPath: "/models/m", ServedModelName: "m", Host: "h", Port: 1, Ranks: 4, AttentionDP: true}
		for _, user := range []string{"--kv-events-config={}", "--kv_events_config {}", "--kv-events-config.endpoint=tcp://*:1"} {
			if args, err := adapter.Args(launch, strings.Fields(user)); err != nil || strings.Contains(strings.Join(args, " "), "zmq") {
				t.Errorf("%s without KV events and with %q: %v, error %v", engineType, user, args, err)
			}
			launch := launch
			launch.KVEventsPort = 5557
			if _, err := adapter.Args(launch, strings.Fields(user)); err == nil || !strings.Contains(err.Error(), "contradicts spec.routing.kvEvents") {
				t.Errorf("%s with %q: error %v", engineType, user, err)
			}
		}
		launch.KVEventsPort = 5557
		args, err := adapter.Args(launch, nil)
		if text := strings.Join(args, " "); err != nil || !strings.Contains(text, want) {
			t.Errorf("%s: %s, error %v; want %s", engineType, text, err, want)
		}
	}
}

// TestKVEventPorts checks the ports of KV events, and that they must be free.
func TestKVEventPorts(t *testing.T) {
	for name, test := range map[string]struct {
		launch      engine.Launch
		first, last int32
		taken       int32
		want        string
	}{
		"none":                  {launch: engine.Launch{Ranks: 8, AttentionDP: true}},
		"data parallel":         {launch: engine.Launch{Ranks: 8, AttentionDP: true, KVEventsPort: 5557}, first: 5557, last: 5572, taken: 5573},
		"tensor parallel":       {launch: engine.Launch{Ranks: 8, KVEventsPort: 5557}, first: 5557, last: 5558, taken: 5559},
		"the port of requests":  {launch: engine.Launch{Ranks: 8, AttentionDP: true, KVEventsPort: 30000}, first: 30000, last: 30015, taken: 30015, want: "spec.routing.kvEvents.port: the engine needs ports 30000 to 30015, but 30015 is taken"},
		"above the last number": {launch: engine.Launch{Ranks: 8, AttentionDP: true, KVEventsPort: 65530}, first: 65530, last: 65545, want: "spec.routing.kvEvents.port: 65530 is too high: the engine needs 16 ports"},
	} {
		first, last := test.launch.KVEventPorts()
		err := test.launch.CheckKVEventPorts(test.taken)
		if first != test.first || last != test.last || (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: ports %d to %d, error %v; want %d to %d, %q", name, first, last, err, test.first, test.last, test.want)
		}
	}
}

// TestPlacementFlags checks the flags that are set and refused when the location of the experts must be known.
func TestPlacementFlags(t *testing.T) {
	launch := engine.Launch{ModelPath: "/models/m", ServedModelName: "m", Host: "h", Port: 1, Ranks: 4, AttentionDP: true, OptionsFile: "/etc/o.yaml"}
	planned := func(engineType string, redundant int32) engine.Launch {
		l := launch
		l.ExpertMap, l.RedundantExperts = "/plan/"+maps()[engineType].File, redundant
		return l
	}
	reshuffled := launch
	reshuffled.Reshuffled = true
	observed := launch
	observed.RoutedExperts = true
	tensorParallel := launch
	tensorParallel.AttentionDP = false
	const vllm = "/models/m --served-model-name m --host h --port 1 --tensor-parallel-size 1 --data-parallel-size 4 --enable-expert-parallel"
	const trtllm = "/models/m --served_model_name m --host h --port 1 --tp_size 4 --ep_size 4 --extra_llm_api_options /etc/o.yaml"
	for name, test := range map[string]struct {
		engine  string
		launch  engine.Launch
		user    string
		want    string // the end of the command line
		wantErr string
	}{
		"SGLang, map":                        {engine: "SGLang", launch: planned("SGLang", 0), want: "--enable-dp-attention --init-expert-location /plan/sglang.json"},
		"SGLang, map with copies":            {engine: "SGLang", launch: planned("SGLang", 8), want: "--init-expert-location /plan/sglang.json --ep-num-redundant-experts 8 --ep-dispatch-algorithm static"},
		"SGLang, permuted checkpoint":        {engine: "SGLang", launch: reshuffled, want: "--enable-dp-attention"},
		"SGLang, both":                       {engine: "SGLang", launch: reshuffled, user: "--init-expert-location /x.json", wantErr: `"--init-expert-location" contradicts the plan of spec.profiling`},
		"SGLang, load balancer, abbreviated": {engine: "SGLang", launch: planned("SGLang", 0), user: "--enable-epl", wantErr: `"--enable-epl" contradicts the plan of spec.profiling`},
		"SGLang, width of attention":         {engine: "SGLang", launch: launch, user: "--attn-dp-size 2", wantErr: `"--attn-dp-size" contradicts spec.parallelism.attention`},
		"SGLang, load balancer":              {engine: "SGLang", launch: planned("SGLang", 0), user: "--enable-eplb", wantErr: `"--enable-eplb" contradicts the plan of spec.profiling`},
		"SGLang, load balancer without plan": {engine: "SGLang", launch: launch, user: "--enable-eplb", want: "--enable-dp-attention --enable-eplb"},
		"SGLang, elastic":                    {engine: "SGLang", launch: observed, user: "--elastic-ep-backend mooncake", wantErr: `"--elastic-ep-backend" contradicts`},
		"SGLang, user-provided copies":       {engine: "SGLang", launch: observed, user: "--ep-num-redundant-experts=8", wantErr: `"--ep-num-redundant-experts=8" contradicts`},

		"SGLang, pipeline":          {engine: "SGLang", launch: launch, user: "--pp-size 2", wantErr: `"--pp-size" contradicts spec.parallelism.expertParallelSize`},
		"SGLang, pipeline, long":    {engine: "SGLang", launch: launch, user: "--pipeline-parallel-size=2", wantErr: `"--pipeline-parallel-size=2" contradicts spec.parallelism.expertParallelSize`},
		"SGLang, file":              {engine: "SGLang", launch: observed, user: "--config /x.yaml", wantErr: `spec.engine.args: "--config" names a file that may set flags which the plan of spec.profiling decides`},
		"SGLang, file without plan": {engine: "SGLang", launch: launch, user: "--config /x.yaml", want: "--config /x.yaml"},

		"vLLM":                         {engine: "VLLM", launch: launch, want: vllm},
		"vLLM, attention TP":           {engine: "VLLM", launch: tensorParallel, want: "--tensor-parallel-size 4 --data-parallel-size 1 --enable-expert-parallel"},
		"vLLM, observed":               {engine: "VLLM", launch: observed, want: vllm + " --enable-return-routed-experts --expert-placement-strategy linear"},
		"vLLM, permuted checkpoint":    {engine: "VLLM", launch: reshuffled, want: vllm + " --expert-placement-strategy linear"},
		"vLLM, round robin":            {engine: "VLLM", launch: reshuffled, user: "--expert-placement-strategy round_robin", wantErr: `"--expert-placement-strategy" contradicts the plan`},
		"vLLM, load balancer":          {engine: "VLLM", launch: reshuffled, user: "--eplb-config.window_size 10", wantErr: `"--eplb-config.window_size" contradicts the plan`},
		"vLLM, underscores":            {engine: "VLLM", launch: launch, user: "--data_parallel_size=2", wantErr: `"--data_parallel_size=2" contradicts spec.parallelism.expertParallelSize`},
		"vLLM, short":                  {engine: "VLLM", launch: launch, user: "-tp 2", wantErr: `"-tp" contradicts`},
		"vLLM, another model":          {engine: "VLLM", launch: launch, user: "--model x", wantErr: `"--model" contradicts spec.model.path`},
		"vLLM, a server for each rank": {engine: "VLLM", launch: launch, user: "--data-parallel-external-lb", wantErr: "contradicts spec.parallelism.attention"},
		"vLLM, a rank":                 {engine: "VLLM", launch: launch, user: "-dpn 1", wantErr: `"-dpn" contradicts spec.parallelism.attention`},
		"vLLM, outside":                {engine: "VLLM", launch: launch, user: "-dpe", wantErr: `"-dpe" contradicts spec.parallelism.attention`},
		"vLLM, hybrid":                 {engine: "VLLM", launch: launch, user: "-dph", wantErr: `"-dph" contradicts spec.parallelism.attention`},
		"vLLM, many ports":             {engine: "VLLM", launch: launch, user: "-dpm", wantErr: `"-dpm" contradicts spec.parallelism.attention`},
		"vLLM, file":                   {engine: "VLLM", launch: reshuffled, user: "--config=/x.yaml", wantErr: `"--config=/x.yaml" names a file that may set flags which the plan of spec.profiling decides: put its flags into spec.engine.args`},
		"vLLM, file without plan":      {engine: "VLLM", launch: launch, user: "--config /x.yaml", want: vllm + " --config /x.yaml"},
		"vLLM, experts disabled":       {engine: "VLLM", launch: launch, user: "--disable-expert-parallel", wantErr: `"--disable-expert-parallel" contradicts spec.parallelism.expertParallelSize`},
		"vLLM, no experts":             {engine: "VLLM", launch: launch, user: "--no-enable-expert-parallel", wantErr: "contradicts spec.parallelism.expertParallelSize"},

		"Ascend, map":                  {engine: "VLLMAscend", launch: planned("VLLMAscend", 0), want: `linear --additional-config {"eplb_config":{"expert_map_path":"/plan/vllm-ascend.json"}}`},
		"Ascend, map with copies":      {engine: "VLLMAscend", launch: planned("VLLMAscend", 4), want: `{"eplb_config":{"expert_map_path":"/plan/vllm-ascend.json","num_redundant_experts":4}}`},
		"Ascend, map and user config":  {engine: "VLLMAscend", launch: planned("VLLMAscend", 0), user: "--additional-config {}", wantErr: `"--additional-config" contradicts the plan`},
		"Ascend, balancer, observed":   {engine: "VLLMAscend", launch: observed, user: `--additional-config {"eplb_config":{"dynamic_eplb":true}}`, wantErr: `eplb_config in --additional-config contradicts the plan of spec.profiling, which decides it: remove the member`},
		"Ascend, member, observed":     {engine: "VLLMAscend", launch: observed, user: "--additional-config.eplb_config.dynamic_eplb=true", wantErr: "eplb_config in --additional-config contradicts"},
		"Ascend, member":               {engine: "VLLMAscend", launch: reshuffled, user: "--additional-config.dynamic_eplb true", wantErr: "dynamic_eplb in --additional-config contradicts"},
		"Ascend, member of a member":   {engine: "VLLMAscend", launch: reshuffled, user: "--additional_config.eplb_config.expert_map_path /x.json", wantErr: "eplb_config in --additional-config contradicts"},
		"Ascend, list":                 {engine: "VLLMAscend", launch: reshuffled, user: "--additional-config.expert_map_path+=/x.json", wantErr: "expert_map_path in --additional-config contradicts"},
		"Ascend, object then member":   {engine: "VLLMAscend", launch: reshuffled, user: `--additional-config {"eplb_config":{}} --additional-config.refresh true`, wantErr: "eplb_config in --additional-config contradicts"},
		"Ascend, member then object":   {engine: "VLLMAscend", launch: reshuffled, user: `--additional-config.eplb_config.dynamic_eplb true --additional-config={}`, wantErr: "eplb_config in --additional-config contradicts"},
		"Ascend, no object":            {engine: "VLLMAscend", launch: reshuffled, user: "--additional-config [1]", wantErr: `--additional-config: "[1]" is not a JSON object (`},
		"Ascend, no value":             {engine: "VLLMAscend", launch: reshuffled, user: "--additional-config", wantErr: `--additional-config: "" is not a JSON object (`},
		"Ascend, harmless, observed":   {engine: "VLLMAscend", launch: observed, user: "--additional-config {} --additional-config.refresh=1.5", want: "linear --additional-config {} --additional-config.refresh=1.5"},
		"Ascend, balancer, unobserved": {engine: "VLLMAscend", launch: launch, user: "--additional-config.eplb_config.dynamic_eplb=true", want: "--additional-config.eplb_config.dynamic_eplb=true"},
		"Ascend, user config":          {engine: "VLLMAscend", launch: launch, user: "--additional-config {}", want: vllm + " --additional-config {}"},

		"TensorRT":               {engine: "TensorRTLLM", launch: launch, want: trtllm},
		"TensorRT, map":          {engine: "TensorRTLLM", launch: planned("TensorRTLLM", 0), want: trtllm},
		"TensorRT, options":      {engine: "TensorRTLLM", launch: launch, user: "--config /mine.yaml", wantErr: `"--config" names an options file, which the operator writes: move its content to spec.engine.options`},
		"TensorRT, another size": {engine: "TensorRTLLM", launch: launch, user: "--ep_size 2", wantErr: `"--ep_size" contradicts spec.parallelism.expertParallelSize`},
	} {
		adapter, err := registry.For(test.engine)
		if err != nil {
			t.Fatal(err)
		}
		args, err := adapter.Args(test.launch, strings.Fields(test.user))
		if test.wantErr != "" {
			if err == nil || !strings.Contains(err.Error(), test.wantErr) {
				t.Errorf("%s: error %v, want %q", name, err, test.wantErr)
			}
			continue
		}
		if got := strings.Join(args, " "); err != nil || !strings.HasSuffix(got, test.want) {
			t.Errorf("%s: %v: %s\nwant %s", name, err, got, test.want)
		}
	}
}

// TestNodes checks the flags of a replica that is spread over pods.
func TestNodes(t *testing.T) {
	spread := func(nodes int32) engine.Launch {
		return engine.Launch{ModelPath: "/models/m", ServedModelName: "m", Host: "h", Port: 1, Ranks: 8, AttentionDP: true, Nodes: nodes, NodeRank: "$(INDEX)", LeaderAddress: "leader"}
	}
	worker := spread(2)
	worker.Worker = true
	tensorParallel := spread(2)
	tensorParallel.AttentionDP = false
	for name, test := range map[string]struct {
		engine  string
		launch  engine.Launch
		user    string
		want    string // the end of the command line
		wantErr string
	}{
		"SGLang, one pod":        {engine: "SGLang", launch: spread(1), want: "--enable-dp-attention"},
		"SGLang":                 {engine: "SGLang", launch: spread(4), want: "--enable-dp-attention --nnodes 4 --node-rank $(INDEX) --dist-init-addr leader:20000"},
		"SGLang, attention TP":   {engine: "SGLang", launch: tensorParallel, want: "--ep-size 8 --nnodes 2 --node-rank $(INDEX) --dist-init-addr leader:20000"},
		"SGLang, user flag":      {engine: "SGLang", launch: spread(1), user: "--nnodes 2", wantErr: `"--nnodes" contradicts spec.parallelism.podsPerReplica`},
		"SGLang, uneven":         {engine: "SGLang", launch: spread(3), wantErr: "spec.parallelism.podsPerReplica: 3 does not divide spec.parallelism.expertParallelSize, which is 8"},
		"vLLM, leader":           {engine: "VLLM", launch: spread(2), want: "--enable-expert-parallel --nnodes 2 --node-rank $(INDEX) --master-addr h"},
		"vLLM, worker":           {engine: "VLLM", launch: worker, want: "--nnodes 2 --node-rank $(INDEX) --master-addr leader --headless"},
		"vLLM, many":             {engine: "VLLM", launch: spread(4), want: "--nnodes 4 --node-rank $(INDEX) --master-addr h"},
		"vLLM, user flag":        {engine: "VLLM", launch: spread(4), user: "--data-parallel-start-rank 2", wantErr: `"--data-parallel-start-rank" contradicts spec.parallelism.podsPerReplica`},
		"vLLM, one pod, nnodes":  {engine: "VLLM", launch: spread(1), user: "--nnodes=2", wantErr: `"--nnodes=2" contradicts spec.parallelism.podsPerReplica`},
		"vLLM, attention TP":     {engine: "VLLM", launch: tensorParallel, wantErr: "needs spec.parallelism.attention DataParallel"},
		"TensorRT cannot":        {engine: "TensorRTLLM", launch: spread(2), wantErr: "TensorRTLLM cannot be spread over pods"},
		"vLLM Ascend, like vLLM": {engine: "VLLMAscend", launch: worker, want: "--master-addr leader --headless"},
	} {
		adapter, err := registry.For(test.engine)
		if err != nil {
			t.Fatal(err)
		}
		args, err := adapter.Args(test.launch, strings.Fields(test.user))
		if err == nil {
			err = adapter.CheckNodes(test.launch)
		}
		if test.wantErr != "" {
			if err == nil || !strings.Contains(err.Error(), test.wantErr) {
				t.Errorf("%s: error %v, want %q", name, err, test.wantErr)
			}
			continue
		}
		if got := strings.Join(args, " "); err != nil || !strings.HasSuffix(got, test.want) {
			t.Errorf("%s: %v: %s\nwant %s", name, err, got, test.want)
		}
	}
}

func TestVariables(t *testing.T) {
	adapter, err := registry.For("VLLMAscend")
	if err != nil {
		t.Fatal(err)
	}
	env := []string{"HCCL_BUFFSIZE", "DYNAMIC_EPLB"}
	if err := adapter.CheckEnv(engine.Launch{}, "spec.engine.env", env); err != nil {
		t.Errorf("without a plan the variable is allowed: %v", err)
	}
	for _, launch := range []engine.Launch{{ExpertMap: "/x"}, {Reshuffled: true}, {RoutedExperts: true}} {
		if err := adapter.CheckEnv(launch, "spec.engine.env", env); err == nil || !strings.Contains(err.Error(), "spec.engine.env: DYNAMIC_EPLB contradicts the plan of spec.profiling") {
			t.Errorf("%+v: error %v", launch, err)
		}
	}
}

// TestOptionsFile parses the options file of TensorRT-LLM, the only engine with such a file.
func TestOptionsFile(t *testing.T) {
	for _, adapter := range registry.All() {
		if (adapter.Options != nil) != (adapter.Type == "TensorRTLLM") {
			t.Errorf("%s: options: %v", adapter.Type, adapter.Options != nil)
		}
		if adapter.Options == nil {
			continue
		}
		for _, test := range []struct {
			launch engine.Launch
			want   map[string]any
		}{
			{engine.Launch{}, map[string]any{"enable_attention_dp": false}},
			{engine.Launch{AttentionDP: true}, map[string]any{"enable_attention_dp": true}},
			{engine.Launch{AttentionDP: true, ExpertMap: "/plan/trtllm.yaml"}, map[string]any{
				"enable_attention_dp": true, "moe_config": map[string]any{"load_balancer": "/plan/trtllm.yaml"},
			}},
			{engine.Launch{AttentionDP: true, ExpertMap: "/plan/trtllm.yaml", Options: "max_batch_size: 8\nmoe_config: {backend: CUTLASS, max_num_tokens: 4096}\n"}, map[string]any{
				"enable_attention_dp": true, "max_batch_size": 8.0,
				"moe_config": map[string]any{"backend": "CUTLASS", "max_num_tokens": 4096.0, "load_balancer": "/plan/trtllm.yaml"},
			}},
			{engine.Launch{Options: "kv_cache_config:\n  dtype: fp8\n"}, map[string]any{"enable_attention_dp": false, "kv_cache_config": map[string]any{"dtype": "fp8"}}},
			{engine.Launch{Options: "# nothing\n"}, map[string]any{"enable_attention_dp": false}},
		} {
			text, err := adapter.Options(test.launch)
			if err != nil {
				t.Fatal(err)
			}
			var got map[string]any
			if err := yaml.UnmarshalStrict(text, &got); err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("%+v (-want +got):\n%s", test.launch, diff)
			}
		}
	}
}

// TestUserOptions covers options that cannot be parsed, or that other fields control, and engines without an options
// file.
func TestUserOptions(t *testing.T) {
	planned := engine.Launch{AttentionDP: true, ExpertMap: "/plan/trtllm.yaml"}
	for name, test := range map[string]struct {
		engine, options, want string
		launch                engine.Launch
	}{
		"none":                  {engine: "SGLang"},
		"no file":               {engine: "SGLang", options: "a: 1", want: "spec.engine.options is invalid: SGLang has no options file; use spec.engine.args"},
		"accepted":              {engine: "TensorRTLLM", options: "max_batch_size: 8"},
		"not an object":         {engine: "TensorRTLLM", options: "- 1", want: "spec.engine.options is invalid: it is not a YAML object"},
		"twice":                 {engine: "TensorRTLLM", options: "a: 1\na: 2", want: "spec.engine.options is invalid: it is not a YAML object"},
		"attention":             {engine: "TensorRTLLM", options: "enable_attention_dp: false", want: "spec.engine.options: enable_attention_dp contradicts spec.parallelism.attention"},
		"a size":                {engine: "TensorRTLLM", options: "tensor_parallel_size: 2", want: "tensor_parallel_size contradicts spec.parallelism.expertParallelSize"},
		"moe_config":            {engine: "TensorRTLLM", options: "moe_config: CUTLASS", want: "moe_config is invalid: it must be an object"},
		"balancer and plan":     {engine: "TensorRTLLM", options: "moe_config: {load_balancer: /x.yaml}", launch: planned, want: "moe_config.load_balancer contradicts the plan of spec.profiling"},
		"balancer without plan": {engine: "TensorRTLLM", options: "moe_config: {load_balancer: /x.yaml}"},
	} {
		adapter, err := registry.For(test.engine)
		if err != nil {
			t.Fatal(err)
		}
		test.launch.Options = test.options
		if err := adapter.ValidateOptions(test.launch); (test.want == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want %q", name, err, test.want)
		}
	}
}

// FuzzUserOptions checks for any text that accepted options result in a valid file with the operator's members.
func FuzzUserOptions(f *testing.F) {
	f.Add("max_batch_size: 8\nmoe_config: {backend: CUTLASS}\n")
	f.Add("a: &a [1]\nb: [*a, *a]\n")
	f.Add("null")
	f.Fuzz(func(t *testing.T, text string) {
		adapter, err := registry.For("TensorRTLLM")
		if err != nil {
			t.Fatal(err)
		}
		launch := engine.Launch{AttentionDP: true, ExpertMap: "/plan/trtllm.yaml", Options: text}
		if len(text) > 16<<10 || adapter.ValidateOptions(launch) != nil {
			return
		}
		file, err := adapter.Options(launch)
		if err != nil {
			t.Fatal(err)
		}
		var got struct {
			Attention bool `json:"enable_attention_dp"`
			MoE       struct {
				LoadBalancer string `json:"load_balancer"`
			} `json:"moe_config"`
		}
		if err := yaml.Unmarshal(file, &got); err != nil || !got.Attention || got.MoE.LoadBalancer != "/plan/trtllm.yaml" {
			t.Fatalf("%q becomes %q: %v", text, file, err)
		}
	})
}

func TestUnknownEngine(t *testing.T) {
	if _, err := registry.For("Other"); err == nil || !strings.Contains(err.Error(), `"Other" is invalid: allowed are SGLang, VLLM, VLLMAscend, TensorRTLLM`) {
		t.Errorf("error %v does not name the value and the allowed values", err)
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
	renumber := func(text string, pieceBytes int) (string, error) {
		editor := adapter.RoutedExperts.Renumber(2, 1, func(layer int, id int32) int32 { return id + int32(layer) })
		var out []byte
		for piece := range slices.Chunk([]byte(text), pieceBytes) {
			var err error
			if out, err = editor.Edit(out, piece); err != nil {
				return string(out), err
			}
		}
		out, err := editor.End(out)
		return string(out), err
	}
	for pieceBytes := 1; pieceBytes < 30; pieceBytes++ {
		if got, err := renumber(text, pieceBytes); got != "AQAAAAMAAAADAAAAAAABAA==" || err != nil {
			t.Errorf("in pieces of %d bytes, they become %q, %v", pieceBytes, got, err)
		}
		for name, text := range map[string]string{"not base64": "!", "half a token": "AQAAAA==", "no whole number": "AQA=", "two ends": text + text} {
			if got, err := renumber(text, pieceBytes); err == nil || !strings.Contains(err.Error(), "routed experts") {
				t.Errorf("%s becomes %q, error %v", name, got, err)
			}
		}
	}
	for name, text := range map[string]string{"not base64": "!", "half a token": "AQAAAA==", "no whole number": "AQA="} {
		if _, err := decode(text, 2, 1); err == nil || !strings.Contains(err.Error(), "routed experts") {
			t.Errorf("%s: error %v", name, err)
		}
	}
}
