// Package sglang knows SGLang's command line and HTTP surface.
package sglang

import (
	"encoding/base64"
	"encoding/binary"
	"fmt"
	"strconv"

	"github.com/semmoe/operator/internal/engine"
)

// Adapter returns SGLang's adapter. The header wins over the body's routed_dp_rank.
func Adapter() engine.Adapter {
	return engine.Adapter{
		Command:       []string{"python3", "-m", "sglang.launch_server"},
		RankHeader:    "X-Data-Parallel-Rank",
		HealthPath:    "/health",
		ExpertMapFile: "sglang.json",
		RoutedExperts: engine.RoutedExperts{
			RequestField: "return_routed_experts",
			// The native route, and the two spellings of the extension on the OpenAI routes.
			ResponsePaths: [][]string{{"meta_info", "routed_experts"}, {"sglext", "routed_experts"}, {"sgl_ext", "routed_experts"}},
			Decode:        decodeRoutedExperts,
			Encode:        encodeRoutedExperts,
		},
		Flags: flags,
	}
}

// flags: tensor-parallel size and expert-parallel size are both the number of devices, since SGLang takes the size of the
// whole process group for the expert-parallel one in its expert map. With attention data parallelism the data-parallel
// size is the same again, so that data-parallel rank d is expert-parallel rank d.
func flags(launch engine.Launch) []engine.Flag {
	ranks := strconv.Itoa(int(launch.Ranks))
	const size = "spec.parallelism.expertParallelSize"
	dataParallel := engine.Flag{Names: []string{"--dp-size", "--data-parallel-size", "--dp"}, Value: ranks, Source: size}
	dpAttention := engine.Flag{Names: []string{"--enable-dp-attention"}, Source: "spec.parallelism.attention"}
	if !launch.AttentionDP {
		dataParallel.Forbidden, dataParallel.Source = true, dpAttention.Source
		dpAttention.Forbidden = true
	}
	all := []engine.Flag{
		{Names: []string{"--model-path", "--model"}, Value: launch.ModelPath, Source: "spec.model.path"},
		{Names: []string{"--served-model-name"}, Value: launch.ServedModelName, Source: "spec.model.name"},
		{Names: []string{"--host"}, Value: launch.Host, Source: "the operator (the pod's address)"},
		{Names: []string{"--port"}, Value: strconv.Itoa(int(launch.Port)), Source: "spec.engine.port"},
		{Names: []string{"--tp-size", "--tensor-parallel-size", "--tp"}, Value: ranks, Source: size},
		{Names: []string{"--ep-size", "--expert-parallel-size", "--ep"}, Value: ranks, Source: size},
		dataParallel,
		dpAttention,
		{Names: []string{"--enable-return-routed-experts"}, Source: "spec.routing.samplePercent", Forbidden: !launch.RoutedExperts},
	}
	if launch.RoutedExperts || launch.ExpertMap != "" {
		all = append(all,
			// What is observed is compared with the placement that we know: a map of the user's would make it wrong.
			engine.Flag{Names: []string{"--init-expert-location"}, Value: launch.ExpertMap, Source: "the plan of spec.profiling", Forbidden: launch.ExpertMap == ""},
			// The engine's own load balancer would move experts away from where they are known to be.
			engine.Flag{Names: []string{"--enable-eplb"}, Source: "the plan of spec.profiling", Forbidden: true})
	}
	return all
}

// decodeRoutedExperts reads base64 of little-endian int32, row-major [tokens][layers][top].
func decodeRoutedExperts(text string, layers, top int) ([]int32, error) {
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, fmt.Errorf("routed experts: %w", err)
	}
	if row := 4 * layers * top; row == 0 || len(data)%row != 0 {
		return nil, fmt.Errorf("routed experts: %d bytes are no multiple of 4 bytes x %d layers x %d experts", len(data), layers, top)
	}
	ids := make([]int32, len(data)/4)
	for i := range ids {
		ids[i] = int32(binary.LittleEndian.Uint32(data[4*i:]))
	}
	return ids, nil
}

// encodeRoutedExperts undoes decodeRoutedExperts. The shape does not stand in the text.
func encodeRoutedExperts(ids []int32, _, _ int) string {
	data := make([]byte, 0, 4*len(ids))
	for _, id := range ids {
		data = binary.LittleEndian.AppendUint32(data, uint32(id))
	}
	return base64.StdEncoding.EncodeToString(data)
}
