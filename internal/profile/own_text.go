// SPDX-License-Identifier: Apache-2.0

package profile

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math/rand/v2"

	"github.com/semmoe/operator/internal/model/tokenizer"
	"github.com/semmoe/operator/internal/profile/inspection"
)

// ownTextFormat is the version of OwnText. It changes whenever the requests for the same seed change.
const ownTextFormat = "semmoe-own-text/2"

// OwnText returns requests that need no data set: the model continues each of the given number of random tokens at
// temperature 1, each with another seed. The tokens are those of the vocabulary of words, the text of a tokenizer.json,
// without its added ones. If words is nil or cannot be read, they are all tokens of the model. The digest in the report
// identifies the version of this data set.
func OwnText(requests int, words []byte, vocabulary int, seed uint64) ([]Item, inspection.DatasetReport) {
	startTokens := tokenizer.RegularTokens(words, vocabulary)
	if len(startTokens) == 0 {
		for id := range vocabulary {
			startTokens = append(startTokens, int32(id))
		}
	}
	random := rand.New(rand.NewPCG(seed, 0x6f776e))
	items := make([]Item, requests)
	for i := range items {
		items[i] = Item{Line: i + 1, Own: true, Start: startTokens[random.IntN(len(startTokens))], Seed: random.Int64()}
	}
	return items, OwnTextReport(requests)
}

// OwnTextReport returns the report of OwnText.
func OwnTextReport(requests int) inspection.DatasetReport {
	digest := sha256.Sum256([]byte(ownTextFormat))
	return inspection.DatasetReport{Digest: hex.EncodeToString(digest[:]), Requests: requests}
}

// name identifies an item in messages.
func (item *Item) name() string {
	if item.Own {
		return fmt.Sprintf("own text %d, from token %d", item.Line, item.Start)
	}
	return fmt.Sprintf("line %d of the data set", item.Line)
}
