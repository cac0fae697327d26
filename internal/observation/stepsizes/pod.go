// SPDX-License-Identifier: Apache-2.0

package stepsizes

import (
	"fmt"
	"math"
	"slices"
)

// Pod contains the steps of an engine pod that a router counted. Problem is why it counted none.
type Pod struct {
	Pod      string `json:"pod"`
	Revision string `json:"revision"`
	// Sizes are the mean tokens of each eighth of the steps, smallest first; nil if nothing was counted.
	Sizes []float64 `json:"sizes,omitempty"`
	// Steps is the number of steps, in which older steps count partially. PrefillShare is the share of steps that
	// computed prompts.
	Steps        float64 `json:"steps,omitempty"`
	PrefillShare float64 `json:"prefillShare,omitempty"`
	// Problem is one line that explains why nothing can be read; empty if the metric can be read, or if the engine has
	// computed nothing yet.
	Problem string `json:"problem,omitempty"`
}

const (
	// MaxProblem is the maximum length of a Problem, in bytes.
	MaxProblem = 200
	// MaxSteps is the maximum number of steps of a Pod; maxPods is the maximum number of pods in a report.
	MaxSteps = 1 << 53
	maxPods  = 1 << 14
)

// Validate rejects reports that no router produces.
func Validate(pods []Pod) error {
	if len(pods) > maxPods {
		return fmt.Errorf("steps: %d pods: at most %d are allowed", len(pods), maxPods)
	}
	for i, p := range pods {
		switch {
		case len(p.Sizes) != 0 && len(p.Sizes) != Parts:
			return fmt.Errorf("steps[%d].sizes: %d sizes: 0 or %d are allowed", i, len(p.Sizes), Parts)
		case slices.ContainsFunc(p.Sizes, func(size float64) bool { return !(size >= 1 && size <= maxTokens) }):
			return fmt.Errorf("steps[%d].sizes is %v: numbers from 1 to %d are allowed", i, p.Sizes, maxTokens)
		case !(p.Steps >= 0 && p.Steps <= MaxSteps) || !(p.PrefillShare >= 0 && p.PrefillShare <= 1):
			return fmt.Errorf("steps[%d]: steps is %v and prefillShare %v: allowed are 0 to 2^53 and 0 to 1", i, p.Steps, p.PrefillShare)
		case len(p.Problem) > MaxProblem:
			return fmt.Errorf("steps[%d].problem has %d bytes: at most %d are allowed", i, len(p.Problem), MaxProblem)
		}
	}
	return nil
}

// Sum is the distribution over the pods of a deployment.
type Sum struct {
	// Sizes are rounded; nil if there are fewer than MinSteps steps.
	Sizes []int32
	// Steps is the number of steps. PrefillMilli is the share of them that computed prompts, in thousandths.
	Steps        float64
	PrefillMilli int32
	// Problem is the problem of Pod, the first pod by name with one; empty if any pod has sizes. Pods is the number of
	// pods with a problem.
	Problem, Pod string
	Pods         int
}

// MinSteps is the minimum number of steps for using a distribution: 64 per size.
const MinSteps = 64 * Parts

// Merge sums the reports of routers. Several routers read the same pods at different times; the report with the most
// steps per pod is used.
func Merge(reports ...[]Pod) Sum {
	pods := map[string]Pod{}
	for _, report := range reports {
		for _, p := range report {
			if known, ok := pods[p.Pod]; !ok || p.Steps > known.Steps || p.Problem == "" && known.Problem != "" {
				pods[p.Pod] = p
			}
		}
	}
	var all Histogram
	var sum Sum
	for _, p := range pods {
		for _, size := range p.Sizes {
			all.Add(size, p.Steps/Parts, p.PrefillShare*p.Steps/Parts)
		}
		if p.Problem == "" {
			continue
		}
		if sum.Pods++; sum.Pod == "" || p.Pod < sum.Pod {
			sum.Problem, sum.Pod = p.Problem, p.Pod
		}
	}
	if sum.Steps = all.Steps(); sum.Steps > 0 {
		sum.Problem, sum.Pod, sum.Pods = "", "", 0
	}
	if sum.Steps >= MinSteps {
		sum.Sizes, sum.PrefillMilli = roundSizes(all.Sizes()), int32(math.Round(1000*all.PrefillShare()))
	}
	return sum
}
