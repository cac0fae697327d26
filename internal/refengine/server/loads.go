// SPDX-License-Identifier: Apache-2.0

package server

import (
	"net/http"
	"strconv"
	"time"

	"github.com/semmoe/operator/internal/refengine/scheduler"
)

// rankLoad is one entry of /v1/loads, with SGLang's names.
type rankLoad struct {
	DPRank             int     `json:"dp_rank"`
	Timestamp          float64 `json:"timestamp"`
	NumRunningReqs     int     `json:"num_running_reqs"`
	NumWaitingReqs     int     `json:"num_waiting_reqs"`
	NumUsedTokens      int     `json:"num_used_tokens"`
	NumTotalTokens     int     `json:"num_total_tokens"`
	MaxTotalNumTokens  int     `json:"max_total_num_tokens"`
	TokenUsage         float64 `json:"token_usage"`
	GenThroughput      float64 `json:"gen_throughput"`
	CacheHitRate       float64 `json:"cache_hit_rate"`
	Utilization        float64 `json:"utilization"`
	MaxRunningRequests int     `json:"max_running_requests"`
}

// maxTokens returns the maximum number of tokens of the running requests.
func (e *Engine) maxTokens() int { return e.MaxRunning * e.ContextLength }

func (e *Engine) tokenUsage(l scheduler.Load) float64 {
	return float64(l.UsedTokens) / float64(e.maxTokens())
}

func (e *Engine) loads(w http.ResponseWriter, r *http.Request) error {
	query := r.URL.Query()
	if format := query.Get("format"); format != "" && format != "json" {
		return badRequest("format", "format is %q; only json is supported here, Prometheus figures are at /metrics", format)
	}
	only := -1
	if text := query.Get("dp_rank"); text != "" {
		rank, err := strconv.Atoi(text)
		if err != nil || rank < 0 || rank >= e.dataParallelRanks() {
			return badRequest("dp_rank", "dp_rank is %q; allowed is 0 to %d", text, e.dataParallelRanks()-1)
		}
		only = rank
	}
	now := time.Now()
	list := []rankLoad{}
	running, waiting := 0, 0
	for rank, load := range e.Scheduler.Loads() {
		if only >= 0 && rank != only {
			continue
		}
		running += load.Running
		waiting += load.Waiting
		list = append(list, rankLoad{
			DPRank: rank, Timestamp: float64(now.UnixMicro()) / 1e6,
			NumRunningReqs: load.Running, NumWaitingReqs: load.Waiting,
			NumUsedTokens: load.UsedTokens, NumTotalTokens: load.TotalTokens, MaxTotalNumTokens: e.maxTokens(),
			TokenUsage: e.tokenUsage(load), GenThroughput: load.GenerationThroughput,
			Utilization:        float64(load.Running) / float64(e.MaxRunning),
			MaxRunningRequests: e.MaxRunning,
		})
	}
	answer := object{"timestamp": now.UTC().Format(time.RFC3339Nano), "loads": list}
	if e.Dialect.Name == "" || !e.Dialect.from(5, 17) { // v1_loads.py of 0.5.12
		answer["dp_rank_count"] = e.dataParallelRanks()
		answer["aggregate"] = object{"total_running_reqs": running, "total_waiting_reqs": waiting, "total_reqs": running + waiting}
	}
	writeJSON(w, http.StatusOK, answer)
	return nil
}
