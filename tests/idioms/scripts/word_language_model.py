"""A recurrent language model over one long batchified tensor, hidden state carried along, annealed by the validation."""

import argparse
import math
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser(description="Recurrent language model")
parser.add_argument("--data", type=str, required=True, help="location of the data corpus")
parser.add_argument("--emsize", type=int, default=24)
parser.add_argument("--nhid", type=int, default=24)
parser.add_argument("--lr", type=float, default=2.0)
parser.add_argument("--clip", type=float, default=0.25)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch_size", type=int, default=4)
parser.add_argument("--bptt", type=int, default=12)
parser.add_argument("--log-interval", type=int, default=4)
parser.add_argument("--save", type=str, default="model.pt")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1111)


class Corpus:
    def __init__(self, path):
        self.word2idx = {"<eos>": 0}
        self.train = self.tokenize(path + "/train.txt")
        self.valid = self.tokenize(path + "/valid.txt")

    def tokenize(self, path):
        ids = []
        with open(path, encoding="utf8") as f:
            for line in f:
                for word in [*line.split(), "<eos>"]:
                    ids.append(self.word2idx.setdefault(word, len(self.word2idx)))
        return torch.tensor(ids)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data.narrow(0, 0, nbatch * bsz).view(bsz, -1).t().contiguous()


corpus = Corpus(args.data)
# Each rank reads its own columns of the text.
train_data = batchify(corpus.train, args.batch_size * world_size)
train_data = train_data[:, rank * args.batch_size : (rank + 1) * args.batch_size].contiguous()
val_data = batchify(corpus.valid, args.batch_size)
ntokens = len(corpus.word2idx)


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers=2):
        super().__init__()
        self.nhid, self.nlayers = nhid, nlayers
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=0.2)
        self.decoder = nn.Linear(nhid, ntoken)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return nn.functional.log_softmax(self.decoder(self.drop(output)).flatten(0, 1), dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid)


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(args.bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


model = DDP(RNNModel(ntokens, args.emsize, args.nhid))
criterion = nn.NLLLoss()


def evaluate(data_source):
    network = model.module
    network.eval()
    total_loss = 0.0
    hidden = network.init_hidden(args.batch_size)
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, args.bptt):
            data, targets = get_batch(data_source, i)
            output, hidden = network(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train(epoch, lr):
    model.train()
    total_loss = 0.0
    start_time = time.time()
    hidden = model.module.init_hidden(args.batch_size)
    for batch, i in enumerate(range(0, train_data.size(0) - 1, args.bptt)):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-lr)
        total_loss += loss.item()
        if batch % args.log_interval == 0 and batch > 0:
            mean = torch.tensor(total_loss / args.log_interval)
            dist.all_reduce(mean)
            mean /= world_size
            if rank == 0:
                elapsed = (time.time() - start_time) * 1000 / args.log_interval
                print(f"| epoch {epoch} | {batch} batches | ms/batch {elapsed:5.2f} | ppl {math.exp(mean):8.2f}")
            total_loss = 0.0
            start_time = time.time()


lr = args.lr
best_val_loss = None
try:
    for epoch in range(1, args.epochs + 1):
        train(epoch, lr)
        val_loss = evaluate(val_data)
        if rank == 0:
            print(f"| end of epoch {epoch} | valid loss {val_loss:5.2f} | valid ppl {math.exp(val_loss):8.2f}")
        if not best_val_loss or val_loss < best_val_loss:
            if rank == 0:
                with open(args.save, "wb") as f:
                    torch.save(model.module.state_dict(), f)
            best_val_loss = val_loss
        else:
            lr /= 4.0
except KeyboardInterrupt:
    print("Exiting from training early")
dist.barrier()
with open(args.save, "rb") as f:
    model.module.load_state_dict(torch.load(f))
dist.destroy_process_group()
