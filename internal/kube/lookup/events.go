// SPDX-License-Identifier: Apache-2.0

package lookup

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/semmoe/operator/internal/kube/podhealth"
)

// FailedMounts returns the last event that explains the failed mount, for pods that have waited long for their volumes.
func FailedMounts(ctx context.Context, events client.Reader, pods []*corev1.Pod, now time.Time) (map[types.UID]string, error) {
	messages := map[types.UID]string{}
	for _, pod := range pods {
		if !podhealth.WaitsForVolumes(pod, now) {
			continue
		}
		message, err := LastEvent(ctx, events, pod, "FailedMount", now)
		if err != nil {
			return nil, err
		}
		if message != "" {
			messages[pod.UID] = message
		}
	}
	return messages, nil
}

// EventsPeriod is the interval at which the events of an object that lacks pods are read. Events are not watched, and no
// other object may change when they are recorded.
const EventsPeriod = 10 * time.Second

// LastEvent returns the last line of the newest event of an object with this reason; empty if no event is newer than
// the longest back-off of the controllers that record it.
func LastEvent(ctx context.Context, events client.Reader, object client.Object, reason string, now time.Time) (string, error) {
	const stale = 20 * time.Minute
	var list corev1.EventList
	if err := events.List(ctx, &list, client.InNamespace(object.GetNamespace()), client.MatchingFields{
		"involvedObject.uid": string(object.GetUID()), "reason": reason,
	}); err != nil {
		return "", fmt.Errorf("failed to list events of %s: %w", object.GetName(), err)
	}
	latest := slices.MaxFunc(append(list.Items, corev1.Event{}), func(a, b corev1.Event) int { return a.LastTimestamp.Compare(b.LastTimestamp.Time) })
	if now.Sub(latest.LastTimestamp.Time) > stale {
		return "", nil
	}
	return podhealth.LastLine(latest.Message), nil
}
