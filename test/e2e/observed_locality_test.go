// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"testing"

	"golang.org/x/sync/errgroup"
	"k8s.io/utils/ptr"

	semmoev1 "github.com/semmoe/operator/api/v1alpha1"
	"github.com/semmoe/operator/test/tier"
)

// TestObservedLocality checks that the status reports the local activation rate. With the engine's default placement
// and requests spread over four ranks, about a quarter of the activations are local.
func TestObservedLocality(t *testing.T) {
	tier.Nightly(t)
	t.Parallel()
	namespace := newNamespace(t)
	startManager(t, namespace, nil)
	moed := newDeployment(namespace, "tiny", func(m *semmoev1.MoEDeployment) { m.Spec.Routing.SamplePercent = ptr.To[int32](100) })
	create(t, moed)
	if current := waitComplete(t, moed); current.Status.LAR != nil {
		t.Errorf("a rate is reported before any request: %+v", current.Status.LAR)
	}
	url := serviceURL(t, moed)
	var clients errgroup.Group
	for range 8 {
		clients.Go(func() error {
			for range 8 {
				if err := sendRequest(t.Context(), url, "tiny"); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := clients.Wait(); err != nil {
		t.Fatal(err)
	}
	var lar *semmoev1.LARStatus
	eventually(t, waitTimeout, "the rate is reported", func() error {
		if lar = get(t, moed).Status.LAR; lar == nil {
			return errors.New("no rate in the status")
		}
		return nil
	})
	if *lar.ObservedMilli < 150 || *lar.ObservedMilli > 350 || lar.Summary == "" {
		t.Errorf("the rate is %+v, want about 250 thousandths", lar)
	}
	spread := get(t, moed).Status.Routing
	if spread == nil || len(spread.Ranks) != 4 {
		t.Fatalf("the spread over the ranks is %+v, want four shares", spread)
	}
	sum := int32(0)
	for _, share := range spread.Ranks {
		if sum += share.ShareMilli; share.ShareMilli < 100 || share.ShareMilli > 400 {
			t.Errorf("rank %d gets %d thousandths of the tokens, want about 250", share.Rank, share.ShareMilli)
		}
	}
	if sum != 1000 {
		t.Errorf("the sum of the shares is %d", sum)
	}
}
