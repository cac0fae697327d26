package router

import (
	"encoding/json"
)

const (
	// bytesPerToken is a usual ratio for byte-pair tokenizers. It only balances load; a wrong ratio is wrong for all
	// requests alike.
	bytesPerToken = 4
	// defaultOutput is what a request without a limit is expected to generate.
	defaultOutput = 256
)

// EstimateTokens estimates the load of a request in tokens: its prompt, by length, and what it may generate.
func EstimateTokens(body []byte) int64 {
	type limits struct {
		MaxTokens           *int64 `json:"max_tokens"`
		MaxCompletionTokens *int64 `json:"max_completion_tokens"`
		SamplingParams      struct {
			MaxNewTokens *int64 `json:"max_new_tokens"`
		} `json:"sampling_params"`
	}
	var request limits
	if json.Unmarshal(body, &request) != nil {
		// A body that is not JSON, or of other types, is the engine's to refuse: here it only counts by its length.
		request = limits{}
	}
	output := int64(defaultOutput)
	for _, limit := range []*int64{request.MaxTokens, request.MaxCompletionTokens, request.SamplingParams.MaxNewTokens} {
		if limit != nil && *limit >= 0 {
			output = min(*limit, 1<<20)
			break
		}
	}
	return int64(len(body)/bytesPerToken) + output + 1
}
